"""blocktrain ban: an admin excludes a worker, or lets it work again. No torch.
Next: swarm/coordinator/trust/orders.py."""

from __future__ import annotations

from typing import Annotated

import typer

from blocktrain.cli.options import InviteText
from blocktrain.wire.invite import ADMIN_FILE, read_invite
from blocktrain.wire.people_messages import BanOrder

WorkerKey = Annotated[str, typer.Option("--key", metavar="KEY", help="The worker's key, its beginning, or its alias.")]


def ban(
    invite: InviteText,
    key: WorkerKey,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason that the worker's user sees.")] = "",
    unban: Annotated[bool, typer.Option("--unban", help="Lift a ban or a quarantine.")] = False,
) -> None:
    """Exclude a worker from a run, or let it work again.

    Needs an admin's invite. A banned worker gets no work, and its updates that are not merged yet are left out."""
    address = read_invite(invite, ADMIN_FILE)

    from blocktrain.swarm.worker.client import CoordinatorClient

    with CoordinatorClient(address) as client:
        print(client.ban(BanOrder(worker=key, reason=reason, lifted=unban)))
