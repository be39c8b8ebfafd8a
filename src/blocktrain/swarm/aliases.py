"""Aliases: the names under which people see workers. An alias is made from the worker's public key, so it does not
reveal whose machine it is. The name that a worker gives itself, often its host's, is shown to admins only. Pure.
Next: coordinator/watching/status.py, which shows both."""

from __future__ import annotations

import hashlib

TEMPERS = """Amber Brave Bright Brisk Calm Clear Clever Cosy Daring Eager Fair Fleet Gentle Glad Golden Jolly
Keen Kind Lively Lucky Merry Mild Neat Noble Patient Proud Quick Quiet Silver Steady Sunny Witty"""
ANIMALS = """Badger Beaver Bison Crane Dolphin Eagle Falcon Ferret Finch Fox Gecko Hare Heron Ibex Jackdaw Koala
Lark Lynx Marten Mole Newt Otter Owl Panda Puffin Raven Robin Seal Stork Swift Tapir Wren"""


def alias_of(key: str) -> str:
    """For example "Brisk Otter 3f": one of 262,144, always the same for the same key."""
    digest = hashlib.sha256(key.encode()).digest()
    temper, animal = (words.split()[byte % 32] for words, byte in zip((TEMPERS, ANIMALS), digest[:2], strict=True))
    return f"{temper} {animal} {digest[2]:02x}"
