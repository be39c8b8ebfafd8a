"""blocktrain pause and resume: an admin holds a run and lets it go on. No torch. Next:
swarm/coordinator/coordinator.py."""

from __future__ import annotations

from blocktrain.cli.options import InviteText
from blocktrain.wire.invite import parse_invite


def pause(invite: InviteText) -> None:
    """Give no more work until blocktrain resume.

    Needs an admin's invite; a restarted coordinator stays paused."""
    _set(invite, paused=True)
    print("paused: workers hand in what they have and wait; blocktrain resume lets them go on")


def resume(invite: InviteText) -> None:
    """Let a paused run go on. Needs an admin's invite."""
    _set(invite, paused=False)
    print("resumed: workers get work again within seconds")


def _set(invite: str, paused: bool) -> None:
    address = parse_invite(invite)

    from blocktrain.swarm.worker.client import CoordinatorClient

    with CoordinatorClient(address) as client:
        client.pause(paused)
