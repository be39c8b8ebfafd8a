"""The API keys of a gateway: where they come from, and when there must be some. No torch.
Next: serve/gateway/access.py, which compares them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.errors import ConfigError

API_KEY_VARIABLE = "BLOCKTRAIN_API_KEY"
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help=f"API keys, one a line; ${API_KEY_VARIABLE} holds another."),
]


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """The lines of the file that are no comments, and what the environment holds."""
    lines: list[str] = []
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            detail = getattr(error, "strerror", None) or "not text"
            raise ConfigError(f"{path} cannot be read ({detail}): give a file with an API key a line") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if path is not None and not keys:
        raise ConfigError(f"{path} holds no API key: write one a line, for example from openssl rand -hex 24")
    return (*keys, *os.environ.get(API_KEY_VARIABLE, "").split())


def require_api_key(host: str, api_keys: Sequence[str], insecure: bool) -> None:
    """Beyond this machine."""
    from blocktrain.serve.chain.keys import is_loopback

    if not api_keys and not insecure and not is_loopback(host):
        raise ConfigError(
            f"--host {host} would be open to all: put API keys into a file and give --api-key-file, or set "
            f"{API_KEY_VARIABLE} (or --insecure on a network you trust)"
        )
