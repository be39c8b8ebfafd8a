"""blocktrain resume: an admin continues a paused run. No torch. Next: pause.py."""

from __future__ import annotations

from blocktrain.cli.commands.swarm.pause import set_paused
from blocktrain.cli.options import InviteText


def resume(invite: InviteText) -> None:
    """Continue a paused run.

    Needs an admin's invite."""
    set_paused(invite, False)
    print("resumed: workers get work again within seconds")
