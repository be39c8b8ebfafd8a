"""blocktrain serve: the stages of a model and a gateway on this machine, in one command.
Next: cli/shared/stage_processes.py, which runs the stages; cli/shared/gateway.py, which answers HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.machine import chosen_device
from blocktrain.cli.options import (
    EXIT_INTERRUPTED,
    INVITE_VARIABLE,
    AddressFile,
    DeviceName,
    Home,
    Host,
    MaxConnections,
    MaxPerAddress,
    ModelSource,
    Offload,
    PollSeconds,
    Port,
    TlsCert,
    TlsKey,
    TrustedProxies,
    http_limits,
    require_above_zero,
    require_positive,
)
from blocktrain.cli.shared.gateway import (
    ApiKeyFile,
    Degraded,
    Front,
    OldTopology,
    WireFormat,
    WireOption,
    answer_http,
    checked_access,
    read_api_keys,
)
from blocktrain.cli.shared.signals import run_until_stopped
from blocktrain.http.limits import HttpLimits
from blocktrain.io.private import cache_home

if TYPE_CHECKING:
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.gateway.app import GatewaySettings

RESTART_S = 30.0  # a stage that dies is back within this time; requests wait for it


def serve(
    model: ModelSource,
    stages: Annotated[int, typer.Option(metavar="N", help="Number of processes that share the blocks.")] = 3,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    wire: WireOption = WireFormat.FP16,
    degraded: Degraded = False,
    topology: OldTopology = None,
    api_key_file: ApiKeyFile = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow access without API key and TLS. Only on a network you trust.")
    ] = False,
    device: DeviceName = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Number of CPU threads per stage.")] = None,
    offload: Offload = False,
    poll: PollSeconds = 10.0,
    home: Home = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    max_connections: MaxConnections = HttpLimits.max_connections,
    max_per_address: MaxPerAddress = HttpLimits.max_connections_per_address,
    trusted_proxies: TrustedProxies = None,
    address_file: AddressFile = None,
) -> None:
    """Serve a model on this machine: its stages and a gateway.

    Each stage is its own process and is restarted if it dies. In front of them, a gateway answers OpenAI's completions
    API. Ctrl-C or SIGTERM stops everything."""
    require_positive("--threads", threads)
    if device is not None:
        chosen_device(device)  # refused here, not by every stage
    require_above_zero("--poll", poll)

    from blocktrain.cli.shared.block_source import INVITES, open_source
    from blocktrain.cli.shared.stage_processes import split_blocks
    from blocktrain.http.server import listening
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.gateway.app import GatewaySettings

    source = open_source(model, (home or cache_home()) / "blobs", offload)
    shares = split_blocks(source.num_blocks(), stages)
    own_threads = threads or max(1, (os.cpu_count() or 1) // stages)
    options = ["--threads", str(own_threads), "--poll", str(poll), *(["--home", str(home)] if home else [])]
    options += ["--offload"] if offload else []
    options += ["--device", device] if device else []
    secrets = {INVITE_VARIABLE: model} if model.startswith(INVITES) else {}
    named = [] if secrets else [model]
    arguments = [[*named, "--blocks", f"{share[0]}-{share[-1]}", *options] for share in shares]
    chain = PipelineSettings(wire=wire.value, degraded=degraded, wait_s=RESTART_S)
    api_keys = read_api_keys(api_key_file)
    tls = checked_access(host, api_keys, tls_cert, tls_key, insecure)
    limits = http_limits(max_connections, max_per_address, trusted_proxies)
    access = GatewaySettings(api_keys=api_keys, any_host=insecure, degraded=degraded)
    with listening(host, port, "another gateway") as listener:
        front = Front(listener, tls, limits, address_file)
        stopped_by = asyncio.run(run_until_stopped(_serve(arguments, secrets, chain, access, front)))
    if stopped_by == signal.SIGINT:
        raise typer.Exit(EXIT_INTERRUPTED)


async def _serve(
    arguments: Sequence[Sequence[str]],
    secrets: Mapping[str, str],
    chain: PipelineSettings,
    access: GatewaySettings,
    front: Front,
) -> None:
    from blocktrain.cli.shared.stage_processes import StageProcesses
    from blocktrain.serve.chain.pipeline import Pipeline

    stages = StageProcesses(arguments, secrets, front.address_file)
    async with stages as processes, Pipeline(processes.addresses, chain) as pipeline:
        await answer_http(pipeline, access, front)
