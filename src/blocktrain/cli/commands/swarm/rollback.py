"""blocktrain rollback: an admin undoes versions of a block, or what one worker contributed. No torch.
Next: swarm/coordinator/trust/orders.py."""

from __future__ import annotations

from typing import Annotated

import typer

from blocktrain.cli.options import InviteText
from blocktrain.errors import ConfigError
from blocktrain.wire.invite import ADMIN_FILE, read_invite
from blocktrain.wire.people_messages import RollbackOrder


def rollback(
    invite: InviteText,
    block: Annotated[int | None, typer.Option(metavar="BLOCK", min=0, help="A block of an open phase.")] = None,
    to: Annotated[int | None, typer.Option(metavar="VERSION", min=0, help="The kept version to return to.")] = None,
    without: Annotated[
        str | None, typer.Option(metavar="KEY", help="Remove the updates of this worker, named as in ban.")
    ] = None,
) -> None:
    """Undo versions of a block, or what one worker contributed.

    Needs an admin's invite. With --block and --to, the blocks of its phase return to that version, and the steps since
    are trained again. With --without, every round since the worker's first one is merged again without it."""
    if (block is None) != (to is None) or (without is None) == (to is None):
        raise ConfigError("give --block and --to, or --without")
    address = read_invite(invite, ADMIN_FILE)

    from blocktrain.swarm.worker.client import CoordinatorClient

    with CoordinatorClient(address) as client:
        print(client.roll_back(RollbackOrder(block=block, version=to, without=without)))
