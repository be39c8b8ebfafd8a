"""blocktrain token: who may work on a run or watch it. Tokens are shown once, in an invite; the ledger has hashes.
Next: swarm/ledger/ledger.py."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.console import say, show_table
from blocktrain.cli.options import LedgerUrl, StateFolder
from blocktrain.cli.shared.private import INVITE_FILE, LEDGER_FILE, read_private
from blocktrain.errors import ConfigError
from blocktrain.wire.invite import parse_invite

if TYPE_CHECKING:
    from blocktrain.swarm.ledger.ledger import Ledger


class RoleName(StrEnum):
    WORKER = "worker"
    VIEWER = "viewer"
    ADMIN = "admin"


token = typer.Typer(no_args_is_help=True, help="Say who may work on a run or watch it.")


@token.command(epilog="Example:  blocktrain token add alice --role viewer --dir run/")
def add(
    name: Annotated[str, typer.Argument(help="What the token is listed and revoked by.")],
    folder: StateFolder,
    role: Annotated[RoleName, typer.Option(help="What its holder may do.")] = RoleName.WORKER,
    ledger: LedgerUrl = None,
) -> None:
    """Make a token and print the invite that holds it.

    It is not shown again."""
    with opened_ledger(folder, ledger) as book:
        own = read_private(folder / INVITE_FILE)
        if own is None:
            raise ConfigError(
                f"{folder} has no {INVITE_FILE} with the coordinator's address: start blocktrain coordinator "
                f"with --dir {folder} once"
            )
        invite = replace(parse_invite(own.decode(errors="replace")), access_token=secrets.token_urlsafe(24))
        book.add_token(name, role.value, invite.access_token, time.time())
    say(f"{name} may join as {role.value} with this invite, which is not shown again:")
    print(invite)


@token.command("list", epilog="Example:  blocktrain token list --dir run/")
def show(
    folder: StateFolder,
    ledger: LedgerUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of a table.")] = False,
) -> None:
    """Show who has a token, and who had one."""
    with opened_ledger(folder, ledger) as book:
        tokens = book.tokens()
    if as_json:
        print(json.dumps([asdict(each) for each in tokens], indent=2))
        return
    rows = [[each.name, each.role, _when(each.created_s), _when(each.revoked_s)] for each in tokens]
    show_table(["name", "role", "made", "revoked"], rows or [["none yet", "", "", ""]])


@token.command(epilog="Example:  blocktrain token revoke alice --dir run/")
def revoke(
    name: Annotated[str, typer.Argument(help="As it was added.")], folder: StateFolder, ledger: LedgerUrl = None
) -> None:
    """End a token: whoever holds it is refused from now on."""
    with opened_ledger(folder, ledger) as book:
        if not book.revoke_token(name, time.time()):
            good = ", ".join(each.name for each in book.tokens() if each.revoked_s is None) or "none"
            raise ConfigError(f'there is no token "{name}" to revoke: name one of those in use ({good})')
    print(f"{name} is revoked")


@contextmanager
def opened_ledger(folder: Path, url: str | None) -> Iterator[Ledger]:
    """The ledger of a run that there is; looking for one does not make one."""
    from blocktrain.swarm.ledger.ledger import Ledger

    if url is None and not (folder / LEDGER_FILE).is_file():
        raise ConfigError(f"{folder} has no {LEDGER_FILE}: give the --dir of blocktrain coordinator, or its --ledger")
    book = Ledger(url or folder / LEDGER_FILE)
    try:
        yield book
    finally:
        book.close()


def _when(at_s: float | None) -> str:
    return "" if at_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
