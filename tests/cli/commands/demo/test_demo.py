"""What the demo chooses and says. tests/e2e/test_demo_process.py runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.cli.commands.demo.demo import TOKENIZER, chosen_prompt, own_tokenizer, shared_among, steps_of, what_next
from blocktrain.data.prepare import Plan, prepare
from blocktrain.spec import preset

SMALL = preset("small")


@pytest.mark.parametrize("workers", [1, 2, 4, 1000])
def test_the_windows_of_a_step_are_shared_among_the_workers(workers):
    changed = dict(change.split("=") for change in shared_among(workers, SMALL))
    assert int(changed["train.windows"]) == max(1, 2 * SMALL.train.windows // workers)


@pytest.mark.parametrize("steps, fewer", [(400, 280), ((400, 40, 1), [280, 28, 1])])
def test_a_run_on_tokens_takes_fewer_steps_and_one_on_bytes_all(steps, fewer):
    on_bytes = SMALL.with_(**{"train.steps": steps})
    assert steps_of(on_bytes.with_(**{"corpus.tokenizer": TOKENIZER})) == fewer
    assert steps_of(on_bytes) == (steps if isinstance(steps, int) else list(steps))


def test_text_is_read_with_a_tokenizer_unless_it_is_prepared(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{n} bottles of beer on the wall.\n\n" for n in range(1000)))
    prepared = prepare(Plan((str(tmp_path / "text.txt"),), "bytes"), tmp_path / "corpus").folder
    assert own_tokenizer(None) == own_tokenizer(str(tmp_path / "text.txt")) == [f"corpus.tokenizer={TOKENIZER}"]
    assert own_tokenizer(str(prepared)) == []


@pytest.mark.parametrize(
    "options, words",
    [
        (["--corpus", "nothere"], 'corpus "nothere" is not a file or folder here'),
        (["--corpus", "model"], 'corpus "model" holds a trained model, not text'),
        (["--dir", "model"], "--dir model holds a trained model: name another directory"),
        (["--dir", "swarm"], "--dir swarm holds the run of a coordinator: name another directory"),
        (["--dir", "model/manifest.json"], "--dir model/manifest.json is a file: name a directory"),
    ],
)
def test_a_wrong_text_or_directory_is_refused_before_anything_starts(run, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    for path in (Path("model/manifest.json"), Path("swarm/ledger.db")):
        path.parent.mkdir()
        path.touch()
    before = sorted(tmp_path.rglob("*"))
    result = run("demo", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


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
