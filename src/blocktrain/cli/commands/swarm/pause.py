"""blocktrain pause: an admin pauses a run. No torch. Next: swarm/coordinator/coordinator.py."""

from __future__ import annotations

from blocktrain.cli.options import InviteText
from blocktrain.wire.invite import ADMIN_FILE, read_invite


def pause(invite: InviteText) -> None:
    """Give workers no more work until blocktrain resume.

    Needs an admin's invite. The run stays paused when the coordinator restarts."""
    set_paused(invite, True)
    print("paused: workers submit what they have trained and wait; blocktrain resume continues the run")


def set_paused(invite: str, paused: bool) -> None:
    address = read_invite(invite, ADMIN_FILE)

    from blocktrain.swarm.worker.client import CoordinatorClient

    with CoordinatorClient(address) as client:
        client.pause(paused)
