"""blocktrain stage: serve some blocks of a model to a gateway, and swap to newer versions as they come.
Next: serve/chain/stage.py, which does it; following.py, where the blocks come from."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import EXIT_INTERRUPTED, require_positive
from blocktrain.cli.shared.address_file import AddressFile, write_address
from blocktrain.cli.shared.private import cache_home
from blocktrain.errors import BlockTrainError, ConfigError

if TYPE_CHECKING:
    from blocktrain.cli.shared.block_source import Source
    from blocktrain.serve.chain.stage import Stage
    from blocktrain.serve.segment.segment import Segment

INVITES = ("bt://", "bts://")
ModelSource = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model directory, or the invite bt://…#… of a training run, in quotes.")
]
KeyFile = Annotated[
    Path | None, typer.Option("--keys", metavar="FILE", help="The chain's key, made by blocktrain keys.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No key beyond this machine: on a network you trust.")]
Offload = Annotated[
    bool, typer.Option("--offload", help="Leave the layers on the disk: for blocks larger than the memory.")
]
LookEvery = Annotated[float, typer.Option("--poll", metavar="SECONDS", help="Look for a newer version so often.")]
Home = Annotated[
    Path | None, typer.Option("--home", metavar="DIR", help="Where downloads are kept; ~/.cache/blocktrain.")
]


def stage(
    model: ModelSource,
    blocks: Annotated[str | None, typer.Option(metavar="A-B", help="Which blocks; all by default.")] = None,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="tcp://HOST:PORT; port * takes a free one.")
    ] = "tcp://127.0.0.1:7001",
    key_file: KeyFile = None,
    insecure: Insecure = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, mps.")] = "cpu",
    threads: Annotated[int | None, typer.Option(metavar="N", help="Of the CPU, for computing.")] = None,
    cache: Annotated[int, typer.Option(metavar="BYTES", help="Memory for the sessions' caches.")] = 2**30,
    offload: Offload = False,
    max_waiting: Annotated[int, typer.Option(metavar="N", help="Requests that may wait.")] = 64,
    poll: LookEvery = 10.0,
    home: Home = None,
    address_file: AddressFile = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when stdin closes.")] = False,
) -> None:
    """Hold some blocks of a model and compute for a gateway.

    Ends with 0 on SIGTERM, with 130 on Ctrl-C."""
    for option, value in (("--threads", threads), ("--cache", cache), ("--max-waiting", max_waiting)):
        require_positive(option, value)
    if poll <= 0:
        raise ConfigError(f"--poll {poll:g} is too small: give seconds above 0")
    wanted = parse_blocks(blocks) if blocks is not None else None
    require_files(model, offload)

    import torch

    from blocktrain.serve.chain.keys import read_key, require_key
    from blocktrain.serve.chain.stage import Stage, StageSettings

    key = read_key(key_file) if key_file else None
    require_key(listen, key, insecure, listen=True)
    if threads is not None:
        torch.set_num_threads(threads)
    source = source_of(model, home)
    options = {"device": checked_device(device), "cache_bytes": cache, **({"offload": True} if offload else {})}
    segment = source.newest(wanted, None, **options)
    assert segment is not None
    settings = StageSettings(listen=listen, insecure=insecure, max_waiting=max_waiting)
    held = segment.blocks

    def look(known: str) -> Segment | None:
        return source.newest(held, known, **options)

    asyncio.run(_serve(Stage(segment, settings, key=key), segment, look, poll, address_file, with_parent))


def require_files(model: str, offload: bool) -> None:
    if offload and model.startswith(INVITES):
        raise ConfigError("--offload reads from files and a training run has none here: blocktrain export it first")


def parse_blocks(text: str) -> list[int]:
    """ "1-3" -> 1, 2, 3"""
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ConfigError(f"--blocks {text} names no blocks: write 2, or 0-1")
    return list(range(int(found[1]), int(found[2] or found[1]) + 1))


def source_of(model: str, home: Path | None) -> Source:
    from blocktrain.cli.shared.block_source import DirectorySource, RunSource

    if not model.startswith(INVITES):
        return DirectorySource(Path(model))

    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.wire.invite import parse_invite

    return RunSource(CoordinatorClient(parse_invite(model)), (home or cache_home()) / "blobs")


def checked_device(name: str) -> str:
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        detail = str(error).splitlines()[0][:100]
        raise ConfigError(
            f"--device {name} cannot be used here ({detail}): give cpu, or one this machine has"
        ) from None
    return name


async def _serve(
    stage: Stage,
    segment: Segment,
    look: Callable[[str], Segment | None],
    every_s: float,
    address_file: Path | None,
    with_parent: bool,
) -> None:
    async with stage:
        first, last, total = segment.blocks[0], segment.blocks[-1], segment.info.blocks
        span = f"block {first}" if first == last else f"blocks {first}-{last}"
        print(
            f"{stage.address} serves {span} of 0-{total - 1} of {segment.info.name}, version {segment.info.version}",
            flush=True,
        )
        write_address(address_file, stage.address)
        told = asyncio.create_task(told_to_stop(with_parent))
        following = asyncio.create_task(_follow(stage, look, every_s))
        ends: list[asyncio.Future[Any]] = [told, following, stage.broken]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for failed in (following, stage.broken):
                if failed.done():
                    failed.result()
        finally:
            following.cancel()
            told.cancel()
    if told.result() == signal.SIGINT:
        raise typer.Exit(EXIT_INTERRUPTED)


async def _follow(stage: Stage, look: Callable[[str], Segment | None], every_s: float) -> None:
    """An error is one line, once while it lasts, and never the end: the version that is held goes on."""
    from blocktrain.cli.shared.block_source import next_look_s

    said = ""
    while True:
        await asyncio.sleep(next_look_s(time.time(), every_s))
        try:
            newer = await asyncio.to_thread(look, stage.versions[0])
            if newer is not None:
                stage.offer(newer)
                say(f"swapped to version {newer.info.version}")
            said = ""
        except BlockTrainError as error:
            if str(error) != said:
                say(f"error: {error}")
            said = str(error)


async def told_to_stop(with_parent: bool = False) -> signal.Signals:
    """The signal that said so; a parent that is gone counts as SIGTERM."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[signal.Signals] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not told.done():
            told.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    if with_parent:
        loop.add_reader(sys.stdin, lambda: None if os.read(sys.stdin.fileno(), 1) else stop(signal.SIGTERM))
    try:
        return await told
    finally:
        if with_parent:
            loop.remove_reader(sys.stdin)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
