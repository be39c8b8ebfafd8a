"""blocktrain gateway: stages on other hosts behind OpenAI's completions API, with a page to try them on.
Next: serve/gateway/app.py, the routes; serve/chain/pipeline.py, the chain behind them."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.commands.serving.serve import (
    Degraded,
    Topology,
    TopologyOption,
    WireFormat,
    WireOption,
    until_told,
)
from blocktrain.cli.commands.serving.stage import Insecure, KeyFile
from blocktrain.cli.console import say
from blocktrain.cli.options import EXIT_INTERRUPTED, require_positive
from blocktrain.cli.shared.address_file import AddressFile, write_address
from blocktrain.cli.shared.api_keys import ApiKeyFile, read_api_keys, require_api_key
from blocktrain.cli.shared.logs import requests_logged
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.serve.chain.keys import ChainKey
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.gateway.app import GatewaySettings

ORIGIN = re.compile(r"https?://[^\s/]+|\*")


def gateway(
    stages: Annotated[str, typer.Option(metavar="ADDRESS,…", help="tcp://HOST:PORT of every stage, by commas.")],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0: a free one.")] = 8000,
    key_file: KeyFile = None,
    api_key_file: ApiKeyFile = None,
    insecure: Insecure = False,
    wire: WireOption = WireFormat.FP16,
    topology: TopologyOption = Topology.CHAIN,
    degraded: Degraded = False,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Let web pages of this origin ask. Repeatable.")
    ] = None,
    max_bytes: Annotated[int, typer.Option(metavar="N", help="The longest text of a request.")] = 4096,
    max_choices: Annotated[int, typer.Option(metavar="N", help="The most texts of a request.")] = 16,
    max_texts: Annotated[int, typer.Option(metavar="N", help="Texts written at once; more get 429.")] = 64,
    rate: Annotated[
        int | None, typer.Option(metavar="N", help="Requests a minute and key; no limit by default.")
    ] = None,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", help="The longest that a request may take.")] = 300.0,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="A JSON object a request instead of a line.")] = False,
    address_file: AddressFile = None,
) -> None:
    """Answer HTTP for a model whose blocks are served by stages.

    OpenAI's completions API at /v1, a page to try it at /, /healthz and /metrics. Ends with 0 on SIGTERM, with 130 on
    Ctrl-C."""
    limits = {"--max-bytes": max_bytes, "--max-choices": max_choices, "--max-texts": max_texts, "--rate": rate}
    for option, value in limits.items():
        require_positive(option, value)
    if not deadline > 0:
        raise ConfigError(f"--deadline {deadline:g} is too short: give seconds above 0")
    api_keys, origins = read_api_keys(api_key_file), checked_origins(cors or ())

    from blocktrain.http.server import listening
    from blocktrain.serve.chain.keys import read_key
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.gateway.app import GatewaySettings

    require_api_key(host, api_keys, insecure)
    door = GatewaySettings(
        api_keys=api_keys,
        any_host=insecure,
        cors_origins=origins,
        max_bytes=max_bytes,
        max_choices=max_choices,
        max_texts=max_texts,
        degraded=degraded,
        requests_per_minute=rate,
        deadline_s=deadline,
    )
    chain = PipelineSettings(
        topology=topology.value, wire=wire.value, degraded=degraded, insecure=insecure, deadline_s=deadline
    )
    addresses = [address.strip() for address in stages.split(",") if address.strip()]
    key = read_key(key_file) if key_file else None
    with listening(host, port, "another gateway") as listener, requests_logged(json_logs):
        stopped_by = asyncio.run(until_told(_serve(addresses, chain, key, door, listener, address_file)))
    if stopped_by == signal.SIGINT:
        raise typer.Exit(EXIT_INTERRUPTED)


def checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(f'--cors "{origin}" is no origin: write for example https://example.org')
    return tuple(origins)


async def _serve(
    addresses: Sequence[str],
    chain: PipelineSettings,
    key: ChainKey | None,
    door: GatewaySettings,
    listener: socket.socket,
    address_file: Path | None,
) -> None:
    from blocktrain.http.server import serve_until_cancelled
    from blocktrain.serve.chain.pipeline import Pipeline
    from blocktrain.serve.gateway.app import build_gateway

    async with Pipeline(addresses, chain, key=key) as pipeline:
        host, port = listener.getsockname()[:2]
        place = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"{place}/v1", flush=True)
        write_address(address_file, f"{place}/v1")
        say(f"serves {pipeline.info.name}, version {pipeline.info.version}; open {place} in a browser to try it")
        await serve_until_cancelled(build_gateway(pipeline, door), listener)
