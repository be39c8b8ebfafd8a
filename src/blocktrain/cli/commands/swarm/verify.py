"""blocktrain verify: checks everything that a coordinator's directory holds, and repairs what it can.
Next: swarm/verify.py, which does it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.options import LedgerUrl

if TYPE_CHECKING:
    from blocktrain.swarm.verify import VerifyReport

EXIT_WRONG = 1


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's --dir.", show_default=False)],
    ledger_url: LedgerUrl = None,
    blobs: Annotated[
        str | None, typer.Option(metavar="URL", help="The coordinator's --blobs, if they are elsewhere.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Merge damaged versions again. Stop the coordinator first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of lines.")] = False,
) -> None:
    """Check a run: blobs, acknowledged updates, signatures and versions.

    Exits with 1 if something is wrong and was not repaired."""
    from blocktrain.swarm.verify import verify as verified

    found = verified(folder, ledger_url, blobs, repair)
    if as_json:
        print(json.dumps({**asdict(found), "good": found.good}, indent=2))
    else:
        _show(found)
    if not found.good:
        raise typer.Exit(EXIT_WRONG)


def _show(found: VerifyReport) -> None:
    print(f"{found.blobs} blobs, {found.updates} updates in the chain, {found.signatures} signatures")
    print(f"{found.versions} versions merged again, {found.not_merged_again} rounds whose updates are no longer kept")
    for fault in found.faults:
        print(f"{'repaired' if fault.repaired else 'WRONG'}  {fault.kind}: {fault.text}")
    print("all is well" if found.good else f"{sum(not x.repaired for x in found.faults)} things are wrong")
