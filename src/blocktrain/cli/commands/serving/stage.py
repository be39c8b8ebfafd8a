"""blocktrain stage: serves some blocks of a model to a gateway, and replaces them when a newer version appears.
Next: serve/chain/stage.py, which does it; cli/shared/block_source.py, where the blocks come from."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import say, show_line
from blocktrain.cli.machine import chosen_device, parse_size, use_threads
from blocktrain.cli.options import (
    EXIT_INTERRUPTED,
    AddressFile,
    DeviceName,
    Home,
    Insecure,
    KeyFile,
    ModelSource,
    Offload,
    PollSeconds,
    Threads,
    require_above_zero,
    require_positive,
)
from blocktrain.cli.shared.signals import stop_signal
from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.io.address_file import write_address
from blocktrain.io.allocator import keep_some_memory
from blocktrain.io.private import cache_home

if TYPE_CHECKING:
    from blocktrain.serve.chain.sockets import ChainKey
    from blocktrain.serve.chain.stage import Stage
    from blocktrain.serve.segment.segment import Segment

LISTEN, ANY_PORT = "tcp://127.0.0.1:7001", "tcp://127.0.0.1:*"
Look = Callable[[str], "Segment | None"]  # the newest version, unless it is the one named


def stage(
    model: ModelSource,
    blocks: Annotated[str | None, typer.Option(metavar="A-B", help="Blocks to serve, all by default.")] = None,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="tcp://HOST:PORT; port * is any free port.")] = LISTEN,
    key_file: KeyFile = None,
    insecure: Insecure = False,
    device: DeviceName = None,
    threads: Threads = None,
    cache: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for the KV caches of all sessions, for example 512MB.")
    ] = "1GiB",
    offload: Offload = False,
    max_waiting: Annotated[int, typer.Option(metavar="N", help="Length of the queue of requests.")] = 64,
    poll: PollSeconds = 10.0,
    home: Home = None,
    via: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Connect to the gateway's --relay there instead of opening a port."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --via: the address is tcp://NAME.via:1.")
    ] = None,
    address_file: AddressFile = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True, help="Stop when stdin closes.")] = False,
) -> None:
    """Serve some blocks of a model to a gateway.

    Looks for newer versions of the blocks and changes to them without a pause. Ctrl-C or SIGTERM stops it."""
    require_positive("--max-waiting", max_waiting)
    cache_bytes = parse_size("--cache", cache)
    require_above_zero("--poll", poll)
    wanted = parse_blocks(blocks) if blocks is not None else None

    from blocktrain.cli.shared.block_source import open_source
    from blocktrain.serve.chain.sockets import read_key, require_key
    from blocktrain.serve.chain.stage import Stage, StageSettings

    key = read_key(key_file) if key_file else None
    hidden = hidden_behind(via, name, key, insecure)
    listen = ANY_PORT if hidden and listen == LISTEN else listen
    require_key(listen, key, insecure, listen=True)
    use_threads(threads)
    keep_some_memory()
    own_device = chosen_device("cpu" if device is None and offload else device)  # offloaded layers are on this side
    source = open_source(model, (home or cache_home()) / "blobs", offload)
    options = {"device": own_device, "cache_bytes": cache_bytes, **({"offload": True} if offload else {})}
    segment = source.newest(wanted, None, **options)
    assert segment is not None
    settings = StageSettings(listen=listen, insecure=insecure, max_waiting=max_waiting)
    settings = replace(settings, relay=hidden.via.removeprefix("tcp://")) if hidden else settings
    held = segment.blocks

    def look(known: str) -> Segment | None:
        return source.newest(held, known, **options)

    asyncio.run(_serve(Stage(segment, settings, key=key), segment, look, poll, address_file, with_parent, hidden))


@dataclass(frozen=True)
class Hidden:
    """Where others reach a stage without an open port: through the relay of a gateway, by its name."""

    via: str
    name: str
    address: str
    key: ChainKey | None


def hidden_behind(via: str | None, name: str | None, key: ChainKey | None, insecure: bool) -> Hidden | None:
    from blocktrain.serve.chain.relay import relayed_address
    from blocktrain.serve.chain.sockets import require_key

    if via is None and name is None:
        return None
    if via is None or name is None:
        raise ConfigError("a stage behind a relay has a name: give both --via and --name, or neither")
    require_key(via, key, insecure)
    return Hidden(via, name, relayed_address(name), key)


def parse_blocks(text: str) -> list[int]:
    """ "1-3" -> 1, 2, 3"""
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ConfigError(f"--blocks {text} names no blocks: write 2, or 0-1")
    return list(range(int(found[1]), int(found[2] or found[1]) + 1))


async def _serve(
    stage: Stage,
    segment: Segment,
    look: Look,
    every_s: float,
    address_file: Path | None,
    with_parent: bool,
    hidden: Hidden | None,
) -> None:
    async with stage:
        with stop_signal(with_parent) as stopped:
            first, last, total = segment.blocks[0], segment.blocks[-1], segment.info.blocks
            span = f"block {first}" if first == last else f"blocks {first}-{last}"
            model = f"{segment.info.name}, version {segment.info.version}"
            address = hidden.address if hidden else stage.address
            show_line(f"{address} serves {span} of 0-{total - 1} of {model}")
            write_address(address_file, address)
            beside = [asyncio.create_task(_follow(stage, look, every_s))]
            if hidden is not None:
                beside.append(asyncio.create_task(_dial(hidden, stage.address)))
            ends: list[asyncio.Future[Any]] = [stopped, *beside, stage.broken]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for failed in (*beside, stage.broken):
                    if failed.done():
                        failed.result()
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
    if stopped.result() == signal.SIGINT:
        raise typer.Exit(EXIT_INTERRUPTED)


async def _dial(hidden: Hidden, listening: str) -> None:
    from blocktrain.serve.chain.relay import Dialer

    await Dialer(hidden.via, hidden.name, listening, hidden.key, say).run()


async def _follow(stage: Stage, look: Look, every_s: float) -> None:
    """Looks for newer versions. An error is printed once while it lasts; the stage keeps the version it has."""
    from blocktrain.cli.shared.block_source import next_look_s

    printed = ""
    while True:
        await asyncio.sleep(next_look_s(time.time(), every_s))
        try:
            newer = await asyncio.to_thread(look, stage.versions[0])
            if newer is not None:
                stage.offer(newer)
                say(f"changed to version {newer.info.version}")
            printed = ""
        except BlockTrainError as error:
            if str(error) != printed:
                say(f"error: {error}")
            printed = str(error)
