"""Replays the kept inputs of the fuzzer: all are accepted or refused with one of our errors, in time."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from targets import TARGETS, run

from fuzz import CORPUS, corpus_of, mutated


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_is_accepted_or_refused_properly(name):
    inputs = [*TARGETS[name].seeds, *corpus_of(name)]
    assert len(inputs) > len(TARGETS[name].seeds)
    for data in inputs:
        run(TARGETS[name], data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_hundred_changed_inputs_are_too(name):
    rng, known = random.Random(1), [*TARGETS[name].seeds, *corpus_of(name)]
    kinds = {run(TARGETS[name], mutated(rng, known)) for _ in range(300)}
    assert kinds


def test_every_file_of_the_corpus_belongs_to_a_target():
    assert {path.stem for path in CORPUS.glob("*.txt")} == TARGETS.keys()
