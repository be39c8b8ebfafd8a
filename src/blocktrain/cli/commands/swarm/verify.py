"""blocktrain verify: checks everything that a coordinator's directory holds, and repairs what it can; or checks what
can be seen of a running swarm from outside.
Next: swarm/verify.py and swarm/verify_invite.py, which do it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.options import LedgerUrl, read_secret
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.swarm.verify import VerifyReport

EXIT_WRONG = 1


def verify(
    where: Annotated[
        str, typer.Argument(metavar="DIR|INVITE", help="The coordinator's --dir, or an invite.", show_default=False)
    ],
    ledger_url: LedgerUrl = None,
    blobs: Annotated[
        str | None, typer.Option(metavar="URL", help="The coordinator's --blobs, if they are elsewhere.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Merge damaged versions again. Stop the coordinator first.")
    ] = False,
    receipts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With an invite: check that the run has every update in this receipts.jsonl."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of lines.")] = False,
) -> None:
    """Check a run: blobs, acknowledged updates, signatures and versions.

    Exits with 1 if something is wrong and was not repaired."""
    if is_invite(where):
        if repair or ledger_url or blobs:
            raise ConfigError(
                "--repair, --ledger and --blobs need the coordinator's directory: give that instead of an invite"
            )
        found = _verified_from_outside(where, receipts)
    else:
        from blocktrain.swarm.verify import verify as verified

        found = verified(Path(where), ledger_url, blobs, repair)
    if as_json:
        print(json.dumps({**asdict(found), "good": found.good}, indent=2))
    else:
        _show(found)
    if not found.good:
        raise typer.Exit(EXIT_WRONG)


def is_invite(where: str) -> bool:
    return where.startswith(("bt://", "bts://", "@")) or where == "-" or Path(where).is_file()


def _verified_from_outside(where: str, receipts: Path | None) -> VerifyReport:
    from blocktrain.swarm.verify_invite import verify_invite
    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.wire.invite import parse_invite

    with CoordinatorClient(parse_invite(read_secret(where) or "")) as client:
        return verify_invite(client, receipts)


def _show(found: VerifyReport) -> None:
    chain = "" if found.not_seen else " in the chain"
    print(f"{found.blobs} blobs, {found.updates} updates{chain}, {found.signatures} signatures")
    if found.receipts:
        print(f"{found.receipts} receipts")
    print(f"{found.versions} versions merged again, {found.not_merged_again} rounds whose updates are no longer kept")
    for fault in found.faults:
        print(f"{'repaired' if fault.repaired else 'WRONG'}  {fault.kind}: {fault.text}")
    for what in found.not_seen:
        print(f"not seen from outside: {what}")
    print("all is well" if found.good else f"{sum(not x.repaired for x in found.faults)} things are wrong")
