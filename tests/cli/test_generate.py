"""generate: whole characters, repeatable text, clear refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.cli.generate import characters, harmless


@given(st.binary(max_size=40))
def test_characters_are_what_decoding_all_at_once_gives(data):
    assert "".join(characters(data)) == data.decode("utf-8", "replace")


def test_a_character_appears_with_its_last_byte():
    assert list(characters("aé€".encode())) == ["a", "é", "€"]


def test_a_terminal_gets_no_control_characters():
    assert harmless("a\x1b[2Jb\tc\n\x07") == "a�[2Jb\tc\n�"


def test_the_text_begins_with_the_prompt_and_depends_on_the_seed(run, trained):
    first, again, other = (
        run("generate", trained[0], "--prompt", "Bier für", "--max-bytes", 8, "--seed", seed).stdout
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.startswith("Bier für")
    assert first.endswith("\n")


def test_at_temperature_zero_the_seed_does_not_matter(run, trained):
    texts = {run("generate", trained[0], "--max-bytes", 4, "--temperature", 0, "--seed", s).stdout for s in (1, 2)}
    assert len(texts) == 1


def test_a_model_trained_on_spans_writes_them_in_one_sweep(run, tiny, tmp_path):
    spans = ["--set", "objective.kind=denoise", "--set", "objective.span_share=0.5", "--set", "train.steps=1"]
    assert run("train", *tiny, *spans).exit_code == 0
    result = run("generate", tmp_path / "run", "--mode", "sweep", "--max-bytes", 8, "--prompt", "9 bottles")
    assert result.exit_code == 0
    assert result.stdout.startswith("9 bottles")


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--max-bytes", "0"], "--max-bytes 0 is too small: give 1 or more"),
        (["--temperature", "-1"], "--temperature -1.0 is out of range: give 0 or more"),
        (["--temperature", "nan"], "--temperature nan is out of range"),
        (["--top-p", "0"], "--top-p 0.0 is out of range"),
        (["--top-p", "1.5"], "--top-p 1.5 is out of range: give more than 0 and at most 1"),
        (["--mode", "sweep"], "not trained on spans"),
    ],
)
def test_options_that_make_no_sense_are_named(run, trained, options, complaint):
    result = run("generate", trained[0], *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr


def test_a_run_that_is_not_finished_cannot_write(run, tiny, tmp_path):
    assert run("train", *tiny, "--block", 0).exit_code == 0
    result = run("generate", tmp_path / "run")
    assert result.exit_code == 2
    assert "has no trained block 2, 3 yet: run the blocktrain train that began it again" in result.stderr
