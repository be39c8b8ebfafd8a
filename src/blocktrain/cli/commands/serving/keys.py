"""blocktrain keys: make the key of a chain. Next: serve/chain/keys.py, which reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.shared.private import write_private
from blocktrain.errors import ConfigError


def keys(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where the key goes; nothing there is overwritten.")],
) -> None:
    """Make the one key that all hosts of a chain share.

    Whoever holds the file is in the chain."""
    if path.exists():
        raise ConfigError(f"{path} is there already and others may hold it: name another file, or delete it")

    from blocktrain.serve.chain.keys import new_key_text

    write_private(path, new_key_text().encode())
    print(path)
    say(f"copy it to every host of the chain, and give --keys {path.name} to each stage and the gateway")
