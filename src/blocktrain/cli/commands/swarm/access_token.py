"""blocktrain access-token: who may work on a run or watch it. An access token is shown once, in an invite; the ledger
holds only its hash. Next: swarm/ledger/ledger.py."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Annotated

import typer

from blocktrain.cli.console import say, show_table
from blocktrain.cli.help import Command, Group
from blocktrain.cli.options import LedgerUrl, StateFolder
from blocktrain.cli.shared.ledger import opened_ledger
from blocktrain.errors import ConfigError
from blocktrain.io.private import read_private
from blocktrain.wire.invite import INVITE_FILE, parse_invite


class RoleName(StrEnum):
    WORKER = "worker"
    VIEWER = "viewer"
    ADMIN = "admin"


access_token = typer.Typer(cls=Group, no_args_is_help=True, help="Control who may work on a run or watch it.")


@access_token.command(cls=Command, epilog="Example:  blocktrain access-token add alice --role viewer --dir run/")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name for the list, and for revoking it.")],
    folder: StateFolder,
    role: Annotated[
        RoleName, typer.Option(metavar="ROLE", help="Its role: worker, viewer or admin.")
    ] = RoleName.WORKER,
    ledger: LedgerUrl = None,
) -> None:
    """Make an access token and print its invite.

    The invite is not shown again."""
    if not name.strip():
        raise ConfigError("an access token needs a name, by which it is listed and revoked: give for example alice")
    with opened_ledger(folder, ledger) as opened:
        own = read_private(folder / INVITE_FILE)
        if own is None:
            raise ConfigError(
                f"{folder} has no file {INVITE_FILE} with the coordinator's address: start blocktrain coordinator "
                f"with --dir {folder} once"
            )
        invite = replace(parse_invite(own.decode(errors="replace")), access_token=secrets.token_urlsafe(24))
        opened.add_access_token(name, role.value, invite.access_token, time.time())
    say(f"{name} can join as {role.value} with this invite. It is not shown again.")
    print(invite)


@access_token.command("list", cls=Command, epilog="Example:  blocktrain access-token list --dir run/")
def show(
    folder: StateFolder,
    ledger: LedgerUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of a table.")] = False,
) -> None:
    """List access tokens, also revoked ones."""
    with opened_ledger(folder, ledger) as opened:
        tokens = opened.access_tokens()
    if as_json:
        print(json.dumps([asdict(each) for each in tokens], indent=2))
        return
    rows = [[each.name, each.role, _when(each.created_s), _when(each.revoked_s)] for each in tokens]
    show_table(["name", "role", "created", "revoked"], rows or [["none yet", "", "", ""]])


@access_token.command(cls=Command, epilog="Example:  blocktrain access-token revoke alice --dir run/")
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that was added.")],
    folder: StateFolder,
    ledger: LedgerUrl = None,
) -> None:
    """Revoke an access token: it is refused from now on."""
    with opened_ledger(folder, ledger) as opened:
        if not opened.revoke_access_token(name, time.time()):
            in_use = ", ".join(each.name for each in opened.access_tokens() if each.revoked_s is None) or "none"
            raise ConfigError(f'there is no access token "{name}" to revoke: name one of those in use ({in_use})')
    print(f"{name} is revoked")


def _when(at_s: float | None) -> str:
    return "" if at_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
