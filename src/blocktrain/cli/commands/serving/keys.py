"""blocktrain keys: makes the key of a chain. Next: serve/chain/sockets.py, which reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.errors import ConfigError
from blocktrain.io.private import write_private


def keys(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File for the key. It must not exist yet.")],
) -> None:
    """Make the key that all hosts of a chain share.

    Anyone who has the file can join the chain."""
    if path.exists():
        raise ConfigError(f"{path} exists already and other hosts may use it: name another file, or delete it")

    from blocktrain.serve.chain.sockets import new_key_text

    write_private(path, new_key_text().encode())
    print(path)
    say(f"copy it to every host of the chain; start each stage and the gateway with --keys {path.name}")
