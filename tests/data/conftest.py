"""Texts to prepare: many small documents that are not alike."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

WORDS = [
    "the",
    "of",
    "and",
    "people",
    "house",
    "river",
    "morning",
    "letter",
    "green",
    "seven",
    "Ünïcödé",
    "walked",
    "under",
    "bright",
    "—",
    "stone",
]


def prose(seed: int, num_words: int = 120) -> str:
    """Text that no other seed gives."""
    drawn = random.Random(seed).choices(WORDS, k=num_words)
    lines = [" ".join(drawn[start : start + 11]) for start in range(0, num_words, 11)]
    return ".\n".join(lines) + f" {seed}"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """300 documents as JSON lines."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": prose(seed)}) + "\n" for seed in range(300)))
    return path
