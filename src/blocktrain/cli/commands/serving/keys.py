"""blocktrain keys: makes the key of a chain; exports and imports a worker's key. Next: serve/chain/sockets.py, which
reads the first; swarm/worker/identity.py, which keeps the second."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.errors import ConfigError
from blocktrain.io.private import cache_home, write_private

EXPORT, IMPORT = "export", "import"


def keys(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="File for the key of a chain; or export or import, and then FILE.")
    ],
    worker_file: Annotated[
        Path | None, typer.Argument(metavar="WORKER_FILE", help="File of a worker's key, for export and import.")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The worker's --home. Default: ~/.cache/blocktrain.")
    ] = None,
    number: Annotated[
        int, typer.Option(metavar="N", min=1, help="Which worker of that home, if several work at the same time.")
    ] = 1,
) -> None:
    """Make the key of a chain; export or import the key of a worker.

    Anyone who has the file can join the chain, or work under the worker's name."""
    if worker_file is not None:
        _move(str(path), worker_file, home or cache_home(), number)
        return
    if str(path) in (EXPORT, IMPORT):
        raise ConfigError(f"blocktrain keys {path} needs a file: blocktrain keys {path} worker.key")
    if path.exists():
        raise ConfigError(f"{path} exists already and other hosts may use it: name another file, or delete it")

    from blocktrain.serve.chain.sockets import new_key_text

    write_private(path, new_key_text().encode())
    print(path)
    say(f"copy it to every host of the chain; start each stage and the gateway with --keys {path.name}")


def _move(action: str, file: Path, home: Path, number: int) -> None:
    from blocktrain.swarm.aliases import alias_of
    from blocktrain.swarm.worker.identity import export_key, import_key

    if action == EXPORT:
        alias = alias_of(export_key(home, number, file))
        print(file)
        say(f"this is {alias}: keep it secret; on another machine, blocktrain keys import {file.name}")
    elif action == IMPORT:
        alias = alias_of(import_key(file, home, number))
        print(home)
        say(f"workers of {home} are {alias} from now on: do not let two machines work with one key at the same time")
    else:
        raise ConfigError(f'"{action}" is not known: give export FILE, import FILE, or one file for the key of a chain')
