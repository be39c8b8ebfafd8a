"""What blocktrain serve and blocktrain gateway share: options, API keys, the HTTP server and the request log.
No torch. Next: serve/gateway/app.py, the routes; serve/gateway/access.py, which compares keys."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import say
from blocktrain.cli.shared.address_file import write_address
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
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
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help=f"API keys, one per line. ${API_KEY_VARIABLE} adds one."),
]


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """The lines of the file, without comments, and what the environment variable holds."""
    lines: list[str] = []
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            detail = getattr(error, "strerror", None) or "not text"
            raise ConfigError(f"{path} cannot be read ({detail}): give a file with one API key per line") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if path is not None and not keys:
        raise ConfigError(f"{path} holds no API key: write one per line, for example from openssl rand -hex 24")
    return (*keys, *os.environ.get(API_KEY_VARIABLE, "").split())


def require_api_key(host: str, api_keys: Sequence[str], insecure: bool) -> None:
    """A gateway that other machines can reach needs an API key."""
    from blocktrain.serve.chain.sockets import is_loopback

    if not api_keys and not insecure and not is_loopback(host):
        raise ConfigError(
            f"--host {host} would be open to all: put API keys into a file and give --api-key-file, or set "
            f"{API_KEY_VARIABLE} (or --insecure on a network you trust)"
        )


async def answer_http(
    pipeline: Pipeline, settings: GatewaySettings, listener: socket.socket, address_file: Path | None
) -> None:
    """Answers requests until cancelled."""
    from blocktrain.http.server import serve_until_cancelled
    from blocktrain.serve.gateway.app import build_gateway

    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    app = build_gateway(pipeline, settings)
    print(f"{url}/v1", flush=True)
    say(f"serving {pipeline.info.name}, version {pipeline.info.version}; open {url} in a browser to try it")
    write_address(address_file, f"{url}/v1")
    await serve_until_cancelled(app, listener)


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
        return json.dumps(fields, ensure_ascii=False)


class PlainLog(logging.Formatter):
    """For people: 12:00:01 POST /v1/completions 200, 0.31 s, speculative: 200 bytes in 29 traversals"""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None)
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()}"
        if facts:
            line += f", {facts['seconds']:.3g} s"
            if "mode" in facts:
                line += f", {facts['mode']}: {facts['bytes_written']} bytes in {facts['traversals']} traversals"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
