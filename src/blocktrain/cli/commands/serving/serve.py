"""blocktrain serve: a gateway and the stages of a model on this machine, in one command.
Next: crew.py, which keeps the stages; serve/gateway/app.py, the door."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Coroutine, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.commands.serving.stage import (
    Home,
    LookEvery,
    ModelSource,
    Offload,
    require_files,
    source_of,
    told_to_stop,
)
from blocktrain.cli.console import say
from blocktrain.cli.options import EXIT_INTERRUPTED, require_positive
from blocktrain.cli.shared.address_file import AddressFile, write_address
from blocktrain.cli.shared.api_keys import ApiKeyFile, read_api_keys, require_api_key
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.gateway.app import GatewaySettings

RESTART_S = 30.0  # a stage that dies is back before that, and who waits for it gets an answer


class WireFormat(StrEnum):
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


class Topology(StrEnum):
    CHAIN = "chain"
    FANOUT = "fanout"


WireOption = Annotated[WireFormat, typer.Option("--wire", help="How numbers travel between stages.")]
TopologyOption = Annotated[
    Topology, typer.Option(help="From stage to stage, or (where blocks allow it) all stages asked at once.")
]
Degraded = Annotated[
    bool, typer.Option("--degraded", help="Answer without a lost stage where the model was trained for it.")
]


def serve(
    model: ModelSource,
    stages: Annotated[int, typer.Option(metavar="N", help="Processes that share the blocks.")] = 3,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The gateway listens there.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0: a free one.")] = 8000,
    wire: WireOption = WireFormat.FP16,
    topology: TopologyOption = Topology.CHAIN,
    degraded: Degraded = False,
    api_key_file: ApiKeyFile = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No API key: on a network you trust.")] = False,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Of the CPU, for each stage.")] = None,
    offload: Offload = False,
    poll: LookEvery = 10.0,
    home: Home = None,
    address_file: AddressFile = None,
) -> None:
    """Serve a model on this machine: its stages and a gateway.

    Stage processes, and OpenAI's completions API in front of them. A stage that dies is started again. Ends with 0 on
    SIGTERM, with 130 on Ctrl-C."""
    require_positive("--threads", threads)
    if poll <= 0:
        raise ConfigError(f"--poll {poll:g} is too small: give seconds above 0")
    require_files(model, offload)

    from blocktrain.cli.shared.stage_processes import split_blocks
    from blocktrain.http.server import listening
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.gateway.app import GatewaySettings

    shares = split_blocks(source_of(model, home).num_blocks(), stages)
    own_threads = threads or max(1, (os.cpu_count() or 1) // stages)
    options = ["--threads", str(own_threads), "--poll", str(poll), *(["--home", str(home)] if home else [])]
    options += ["--offload"] if offload else []
    arguments = [[model, "--blocks", f"{share[0]}-{share[-1]}", *options] for share in shares]
    settings = PipelineSettings(topology=topology.value, wire=wire.value, degraded=degraded, wait_s=RESTART_S)
    api_keys = read_api_keys(api_key_file)
    require_api_key(host, api_keys, insecure)
    door = GatewaySettings(api_keys=api_keys, any_host=insecure, degraded=degraded)
    with listening(host, port, "another gateway") as listener:
        stopped_by = asyncio.run(until_told(_serve(arguments, settings, door, listener, address_file)))
    if stopped_by == signal.SIGINT:
        raise typer.Exit(EXIT_INTERRUPTED)


async def _serve(
    arguments: Sequence[Sequence[str]],
    settings: PipelineSettings,
    door: GatewaySettings,
    listener: socket.socket,
    address_file: Path | None,
) -> None:
    from blocktrain.cli.shared.stage_processes import StageProcesses
    from blocktrain.http.server import serve_until_cancelled
    from blocktrain.serve.chain.pipeline import Pipeline
    from blocktrain.serve.gateway.app import build_gateway

    async with StageProcesses(arguments) as processes, Pipeline(processes.addresses, settings) as pipeline:
        host, port = listener.getsockname()[:2]
        url = f"http://{host}:{port}/v1"
        print(url, flush=True)
        write_address(address_file, url)
        say("open the address without /v1 in a browser to try it; Ctrl-C ends it")
        await serve_until_cancelled(build_gateway(pipeline, door), listener)


async def until_told(work: Coroutine[Any, Any, None]) -> signal.Signals:
    """Works until it is told to stop, and says by what; if the work ends by itself, its error is the command's."""
    working, told = asyncio.create_task(work), asyncio.create_task(told_to_stop())
    try:
        await asyncio.wait([working, told], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            raise ConfigError("the gateway ended by itself: see what it said")
        return told.result()
    finally:
        for task in (working, told):
            task.cancel()
        await asyncio.gather(working, told, return_exceptions=True)
