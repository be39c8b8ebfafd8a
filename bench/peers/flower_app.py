"""The Flower app that the SuperLink and the SuperNodes run: a ServerApp that sends the published tensors to all nodes
and means what they answer, a ClientApp that adds its step. Written into an app's folder by flower_side.py.

Arrays travel as the cell's codec says: Flower has none of its own, fp16 is numpy's cast before and after."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from work import Cell, Floats, Rounds, error_of_step, start, step, trained_for

POLL_S = 0.05
DTYPES = {"fp32": np.float32, "fp16": np.float16}
server_app = ServerApp()
client_app = ClientApp()


def given_cell() -> Cell:
    return Cell.read(os.environ["PEERS_CELL"])


def packed(arrays: dict[str, Floats], cell: Cell) -> ArrayRecord:
    return ArrayRecord([array.astype(DTYPES[cell.codec], copy=False) for array in arrays.values()])


def unpacked(record: ArrayRecord, cell: Cell) -> dict[str, Floats]:
    arrays = record.to_numpy_ndarrays()
    return {name: array.astype(np.float32, copy=False) for name, array in zip(cell.shapes, arrays, strict=True)}


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """The step that the worker was given, on top of what was sent; as fp16 the step alone, which loses less."""
    cell, number = given_cell(), int(context.node_config["number"])
    published = unpacked(message.content["arrays"], cell)
    round_number = int(message.content["config"]["round"])
    if trained := trained_for(cell, number):  # in a process of this message's own: the optimiser is kept in a file
        kept = Path(cell.folder) / f"optimiser-{number}"
        trained.go_on(kept, round_number)
        after = trained.weights(published)
        trained.keep(kept)
        return Message(RecordDict({"arrays": packed({n: after[n] for n in cell.shapes}, cell)}), reply_to=message)
    own = step(number, round_number, cell.shapes)
    after = own if cell.codec == "fp16" else {name: published[name] + own[name] for name in own}
    return Message(RecordDict({"arrays": packed(after, cell)}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    cell, measured, errors = given_cell(), Rounds(), list[float]()
    while len(nodes := list(grid.get_node_ids())) < cell.workers:
        time.sleep(POLL_S)
    published, trained = start(cell), trained_for(cell, 0)
    for number in range(cell.rounds + 1):
        with measured.timed():
            mean = averaged(grid, nodes, published, number, cell)
        after = {name: published[name] + mean[name] for name in mean} if cell.codec == "fp16" else mean
        errors.append(trained.loss(after) if trained else error_of_step(published, after, cell.workers, number))
        published = after
    said = {"seconds": measured.seconds, "loopback_bytes": measured.loopback_bytes, "errors": errors}
    whole = Path(cell.folder) / "said.tmp"
    whole.write_text(json.dumps(said))
    whole.rename(Path(cell.folder) / "said.json")


def averaged(grid: Grid, nodes: list[int], published: dict[str, Floats], number: int, cell: Cell) -> dict[str, Floats]:
    """As strategies do it, but looking for replies twenty times a second instead of every three, and adding each one
    up when it comes."""
    record = packed(published, cell)
    contents = [RecordDict({"arrays": record, "config": ConfigRecord({"round": number})}) for _ in nodes]
    messages = [
        Message(content, dst_node_id=node, message_type=MessageType.TRAIN, group_id=str(number))
        for content, node in zip(contents, nodes, strict=True)
    ]
    waiting, mean = (
        set(grid.push_messages(messages)),
        {name: np.zeros(s, np.float32) for name, s in cell.shapes.items()},
    )
    while waiting:
        for reply in grid.pull_messages(waiting):
            if reply.has_error():
                raise RuntimeError(f"a node answered with an error: {reply.error.reason}")
            waiting.discard(reply.metadata.reply_to_message_id)
            for name, array in unpacked(reply.content["arrays"], cell).items():
                mean[name] += array / np.float32(len(nodes))
        time.sleep(POLL_S)
    return mean
