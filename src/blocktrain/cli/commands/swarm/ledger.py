"""blocktrain ledger: who contributed what to a run, in order. Nothing is ever removed from it.
Next: swarm/ledger/ledger.py."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from blocktrain.cli.console import quantity, show_table
from blocktrain.cli.options import LedgerUrl, read_secret
from blocktrain.cli.shared.ledger import all_pages, opened_ledger
from blocktrain.errors import ConfigError
from blocktrain.wire.invite import read_invite

COLUMNS = ["update", "when", "worker", "key", "phase", "round", "shard", "steps", "text", "sent", "lag", "loss", "fate"]


def ledger(
    invite: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE", help="An invite bt://…#… in quotes, @FILE or - for stdin.", callback=read_secret
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="The coordinator's --dir, instead of an invite.")
    ] = None,
    ledger_url: LedgerUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of a table.")] = False,
) -> None:
    """Show who contributed what to a run."""
    if (invite is None) == (folder is None and ledger_url is None):
        raise ConfigError("which ledger? give either an invite, or --dir with the coordinator's directory")
    if invite:
        from blocktrain.swarm.worker.client import CoordinatorClient

        with CoordinatorClient(read_invite(invite)) as client:
            records = list(all_pages(client.contributions))
    else:
        with opened_ledger(folder or Path(), ledger_url) as opened:
            records = list(all_pages(lambda after: [asdict(each) for each in opened.contributions(after)]))
    if as_json:
        print(json.dumps(records, indent=2))
    else:
        show_table(COLUMNS, [_row(record) for record in records] or [["none yet", *[""] * (len(COLUMNS) - 1)]])


def _row(record: Mapping[str, Any]) -> list[str]:
    update = record["update"]
    return [
        str(update["number"]),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(update["received_s"])),
        record["worker_name"],
        f"{update['worker'][:8]}…",
        str(update["phase"] + 1),
        str(record["round"]),
        str(record["shard"]),
        str(update["steps"]),
        quantity(update["tokens"], "B"),
        quantity(update["num_bytes"], "B"),
        str(update["lag"]),
        f"{update['loss']:.4f}",
        _fate(update),
    ]


def _fate(update: Mapping[str, Any]) -> str:
    if update["refused"]:
        return f"refused: {update['refused']}"
    return "waits" if update["merged_round"] is None else f"merged in round {update['merged_round']}"
