"""blocktrain serve: the stages of a model and a gateway on this machine, in one command.
Next: cli/shared/stage_processes.py, which runs the stages; cli/shared/gateway.py, which answers HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.options import (
    EXIT_INTERRUPTED,
    Home,
    ModelSource,
    Offload,
    PollSeconds,
    require_above_zero,
    require_positive,
)
from blocktrain.cli.shared.address_file import AddressFile
from blocktrain.cli.shared.gateway import (
    ApiKeyFile,
    Degraded,
    OldTopology,
    WireFormat,
    WireOption,
    answer_http,
    read_api_keys,
    require_api_key,
)
from blocktrain.cli.shared.signals import run_until_stopped
from blocktrain.io.private import cache_home

if TYPE_CHECKING:
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.gateway.app import GatewaySettings

RESTART_S = 30.0  # a stage that dies is back within this time; requests wait for it


def serve(
    model: ModelSource,
    stages: Annotated[int, typer.Option(metavar="N", help="Number of processes that share the blocks.")] = 3,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 is any free port.")] = 8000,
    wire: WireOption = WireFormat.FP16,
    degraded: Degraded = False,
    topology: OldTopology = None,
    api_key_file: ApiKeyFile = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Need no API key. Only on a network you trust.")] = False,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Number of CPU threads per stage.")] = None,
    offload: Offload = False,
    poll: PollSeconds = 10.0,
    home: Home = None,
    address_file: AddressFile = None,
) -> None:
    """Serve a model on this machine: its stages and a gateway.

    Each stage is its own process and is restarted if it dies. In front of them, a gateway answers OpenAI's completions
    API. Ctrl-C or SIGTERM stops everything."""
    require_positive("--threads", threads)
    require_above_zero("--poll", poll)

    from blocktrain.cli.shared.block_source import open_source
    from blocktrain.cli.shared.stage_processes import split_blocks
    from blocktrain.http.server import listening
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.gateway.app import GatewaySettings

    source = open_source(model, (home or cache_home()) / "blobs", offload)
    shares = split_blocks(source.num_blocks(), stages)
    own_threads = threads or max(1, (os.cpu_count() or 1) // stages)
    options = ["--threads", str(own_threads), "--poll", str(poll), *(["--home", str(home)] if home else [])]
    options += ["--offload"] if offload else []
    arguments = [[model, "--blocks", f"{share[0]}-{share[-1]}", *options] for share in shares]
    chain = PipelineSettings(wire=wire.value, degraded=degraded, wait_s=RESTART_S)
    api_keys = read_api_keys(api_key_file)
    require_api_key(host, api_keys, insecure)
    access = GatewaySettings(api_keys=api_keys, any_host=insecure, degraded=degraded)
    with listening(host, port, "another gateway") as listener:
        stopped_by = asyncio.run(run_until_stopped(_serve(arguments, chain, access, listener, address_file)))
    if stopped_by == signal.SIGINT:
        raise typer.Exit(EXIT_INTERRUPTED)


async def _serve(
    arguments: Sequence[Sequence[str]],
    chain: PipelineSettings,
    access: GatewaySettings,
    listener: socket.socket,
    address_file: Path | None,
) -> None:
    from blocktrain.cli.shared.stage_processes import StageProcesses
    from blocktrain.serve.chain.pipeline import Pipeline

    async with StageProcesses(arguments) as processes, Pipeline(processes.addresses, chain) as pipeline:
        await answer_http(pipeline, access, listener, address_file)
