"""blocktrain gateway: OpenAI's completions API, and a page to try it, for stages on other hosts.
Next: cli/shared/gateway.py, which answers HTTP; serve/chain/pipeline.py, the chain of stages."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import (
    EXIT_INTERRUPTED,
    AddressFile,
    Host,
    Insecure,
    KeyFile,
    MaxConnections,
    MaxPerAddress,
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
    requests_logged,
)
from blocktrain.cli.shared.signals import run_until_stopped
from blocktrain.errors import ConfigError
from blocktrain.http.limits import HttpLimits

if TYPE_CHECKING:
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.chain.sockets import ChainKey
    from blocktrain.serve.gateway.app import GatewaySettings

DIAL_S = 60.0  # for stages behind routers to find the relay
ORIGIN = re.compile(r"https?://[^\s/]+|\*")


StageAddresses = Annotated[
    str, typer.Option(metavar="ADDRESS,…", help="tcp://HOST:PORT of every stage, separated by commas.")
]
RelayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Listen there for stages behind routers (stage --via)."),
]
Origins = Annotated[
    list[str] | None, typer.Option(metavar="ORIGIN", help="Allow web pages of this origin. Repeatable.")
]
MaxBytes = Annotated[int, typer.Option(metavar="N", help="Maximum length of one text.")]
MaxChoices = Annotated[int, typer.Option(metavar="N", help="Maximum number of texts per request.")]
MaxTexts = Annotated[int, typer.Option(metavar="N", help="Maximum number of texts at the same time; more get 429.")]
RequestsPerMinute = Annotated[
    int | None, typer.Option(metavar="N", help="Requests per minute and key. No limit by default.")
]
Deadline = Annotated[float, typer.Option(metavar="SECONDS", help="Longest time for one request.")]
JsonLogs = Annotated[bool, typer.Option("--json-logs", help="Log one JSON object per request instead of one line.")]


def gateway(
    stages: StageAddresses,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    key_file: KeyFile = None,
    relay: RelayAddress = None,
    api_key_file: ApiKeyFile = None,
    insecure: Insecure = False,
    wire: WireOption = WireFormat.FP16,
    degraded: Degraded = False,
    topology: OldTopology = None,
    cors: Origins = None,
    max_bytes: MaxBytes = 4096,
    max_choices: MaxChoices = 16,
    max_texts: MaxTexts = 64,
    rate: RequestsPerMinute = None,
    deadline: Deadline = 300.0,
    json_logs: JsonLogs = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    max_connections: MaxConnections = HttpLimits.max_connections,
    max_per_address: MaxPerAddress = HttpLimits.max_connections_per_address,
    trusted_proxies: TrustedProxies = None,
    address_file: AddressFile = None,
) -> None:
    """Answer HTTP requests with a model that stages serve.

    OpenAI's completions API is at /v1 and a page to try it at /, with /healthz and /metrics. Ctrl-C or SIGTERM stops
    it."""
    for option, value in (("bytes", max_bytes), ("choices", max_choices), ("texts", max_texts)):
        require_positive(f"--max-{option}", value)
    require_positive("--rate", rate)
    require_above_zero("--deadline", deadline)
    api_keys, origins = read_api_keys(api_key_file), checked_origins(cors or ())

    from blocktrain.http.server import listening
    from blocktrain.serve.chain.pipeline import PipelineSettings
    from blocktrain.serve.gateway.app import GatewaySettings

    tls = checked_access(host, api_keys, tls_cert, tls_key, insecure)
    bounds = http_limits(max_connections, max_per_address, trusted_proxies)
    access = GatewaySettings(
        api_keys=api_keys,
        any_host=insecure,
        cors_origins=origins,
        max_tokens=max_bytes,
        max_choices=max_choices,
        max_texts=max_texts,
        degraded=degraded,
        requests_per_minute=rate,
        time_limit_s=deadline,
    )
    chain = PipelineSettings(wire=wire.value, degraded=degraded, insecure=insecure, time_limit_s=deadline)
    addresses = [address.strip() for address in stages.split(",") if address.strip()]
    key = _chain_key(key_file, relay, insecure)
    with listening(host, port, "another gateway") as listener, requests_logged(json_logs):
        front = Front(listener, tls, bounds, address_file)
        stopped_by = asyncio.run(run_until_stopped(_serve(addresses, chain, key, relay, access, front)))
    if stopped_by == signal.SIGINT:
        raise typer.Exit(EXIT_INTERRUPTED)


def _chain_key(key_file: Path | None, relay: str | None, insecure: bool) -> ChainKey | None:
    from blocktrain.serve.chain.sockets import read_key, require_key

    key = read_key(key_file) if key_file else None
    if relay is not None:
        require_key(relay, key, insecure, listen=True)
    return key


def checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(f'--cors "{origin}" is not an origin: write for example https://example.org')
    return tuple(origins)


async def _serve(
    addresses: Sequence[str],
    chain: PipelineSettings,
    key: ChainKey | None,
    relay: str | None,
    access: GatewaySettings,
    front: Front,
) -> None:
    from blocktrain.serve.chain.pipeline import Pipeline
    from blocktrain.serve.chain.relay import Relay

    async with AsyncExitStack() as stack:
        if relay is not None:
            opened = await stack.enter_async_context(Relay(relay, key))
            say(f"stages behind routers join with --via tcp://HOST:{opened.port}")
            chain = replace(chain, relay=opened.address, start_s=DIAL_S)
        pipeline = await stack.enter_async_context(Pipeline(addresses, chain, key=key))
        await answer_http(pipeline, access, front)
