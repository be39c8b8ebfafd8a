"""What blocktrain serve and blocktrain gateway share: options, API keys, the HTTP server and the request log.
No torch. Next: serve/gateway/app.py, the routes; serve/gateway/access.py, which compares keys."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import counted, say
from blocktrain.cli.machine import use_threads
from blocktrain.errors import ConfigError
from blocktrain.io.address_file import write_address
from blocktrain.io.allocator import keep_some_memory
from blocktrain.logs import visible
from blocktrain.wire.invite import bracketed

if TYPE_CHECKING:
    from blocktrain.http.limits import HttpLimits, Listener
    from blocktrain.http.server import Tls
    from blocktrain.serve.chain.pipeline import Pipeline
    from blocktrain.serve.gateway.app import GatewaySettings

API_KEY_VARIABLE = "BLOCKTRAIN_API_KEY"
REQUEST_LOGGER = "blocktrain.serve"


class WireFormat(StrEnum):
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


WireOption = Annotated[
    WireFormat, typer.Option("--wire", metavar="FORMAT", help="Numbers between stages: fp32, fp16, bf16 or int8.")
]
Degraded = Annotated[
    bool, typer.Option("--degraded", help="Answer without a lost stage if the model was trained for it.")
]


def _removed_topology(value: str | None) -> None:
    if value is None:
        return
    if value != "chain":
        reason = "it was slower than speculative decoding over a chain"
        raise ConfigError(f"--topology {value} was removed, because {reason}: leave the option out")
    say("warning: --topology was removed, stages always form a chain; this option goes with the next version")


OldTopology = Annotated[str | None, typer.Option(help="Removed.", hidden=True, callback=_removed_topology)]
ADDS_ONE = f"${API_KEY_VARIABLE} adds one."
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help=f"API keys, one per line; - is stdin. {ADDS_ONE}"),
]


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """The lines of the file, without comments, and what the environment variable holds."""
    lines: list[str] = []
    if path is not None:
        try:
            lines = (sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            detail = getattr(error, "strerror", None) or "not text"
            raise ConfigError(f"{path} cannot be read ({detail}): give a file with one API key per line") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if path is not None and not keys:
        raise ConfigError(f"{path} holds no API key: write one per line, for example from openssl rand -hex 24")
    return (*keys, *os.environ.get(API_KEY_VARIABLE, "").split())


def checked_access(
    host: str, api_keys: Sequence[str], cert: Path | None, key: Path | None, insecure: bool
) -> Tls | None:
    """A gateway that other machines can reach needs an API key and TLS."""
    from blocktrain.cli.shared.certificates import check_tls_files, require_tls
    from blocktrain.http.limits import is_loopback
    from blocktrain.http.server import Tls

    check_tls_files(cert, key)
    if not api_keys and not insecure and not is_loopback(host):
        raise ConfigError(
            f"--host {host} would be open to all: put API keys into a file and give --api-key-file, or set "
            f"{API_KEY_VARIABLE} (or --insecure on a network you trust)"
        )
    require_tls(host, cert is not None, insecure)
    return Tls(cert, key, None) if cert and key else None


@dataclass(frozen=True)
class Front:
    """What the gateway shows to its clients."""

    listener: Listener
    tls: Tls | None
    limits: HttpLimits
    address_file: Path | None


async def answer_http(pipeline: Pipeline, settings: GatewaySettings, front: Front) -> None:
    """Answers requests until cancelled. A gateway computes little: several threads would mostly wait for each other,
    and torch's threads wait busily."""
    from blocktrain.http.server import serve_until_cancelled
    from blocktrain.serve.gateway.app import build_gateway

    use_threads(1)
    keep_some_memory()
    host, port = front.listener.getsockname()[:2]
    url = f"{'https' if front.tls else 'http'}://{bracketed(host)}:{port}"
    app = build_gateway(pipeline, settings)
    print(f"{url}/v1", flush=True)
    say(f"serving {pipeline.info.name}, version {pipeline.info.version}; open {url} in a browser to try it")
    write_address(front.address_file, f"{url}/v1")
    await serve_until_cancelled(app, front.listener, tls=front.tls, limits=front.limits)


@contextmanager
def requests_logged(as_json: bool) -> Iterator[None]:
    """One line per request on stderr."""
    logger, handler = logging.getLogger(REQUEST_LOGGER), logging.StreamHandler()
    handler.setFormatter(JsonLog() if as_json else PlainLog())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class JsonLog(logging.Formatter):
    """For machines: one JSON object per request."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"time_s": round(record.created, 3), "level": record.levelname.lower()}
        fields |= getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)  # in ASCII: no character of a client controls a terminal


class PlainLog(logging.Formatter):
    """For people: 12:00:01 POST /v1/completions 200, 0.31 s, speculative: 200 bytes in 29 traversals"""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None)
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()}"
        if facts:
            line += f", {facts['seconds']:.3g} s"
            if "mode" in facts:
                written = counted(facts["bytes_written"], "byte")
                line += f", {facts['mode']}: {written} in {counted(facts['traversals'], 'traversal')}"
        line = visible(line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
