"""Options that several commands share: sizes and devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from blocktrain.cli.machine import chosen_device, parse_size
from blocktrain.cli.options import warn_about_text
from blocktrain.errors import ConfigError
from blocktrain.spec import preset
from blocktrain.train import trainer


@pytest.mark.parametrize("tokenizer", [None, "bytes", "bpe:300"])
def test_json_in_a_text_file_gets_a_warning_with_every_tokenizer(tmp_path, capsys, tokenizer):
    (tmp_path / "rows.txt").write_text('{"text": "a"}\n{"text": "b"}\n')
    warn_about_text(
        preset("tiny").with_(**{"corpus.source": str(tmp_path / "rows.txt"), "corpus.tokenizer": tokenizer})
    )
    assert "warning: the text rows.txt holds JSON lines" in capsys.readouterr().err


def test_json_lines_with_their_own_ending_are_read_by_a_tokenizer_without_a_warning(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    changes = {"corpus.source": str(tmp_path / "rows.jsonl"), "corpus.tokenizer": "bpe:300"}
    warn_about_text(preset("tiny").with_(**changes))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text, num_bytes",
    [
        ("4GB", 4_000_000_000),
        ("4g", 4_000_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("512MB", 512_000_000),
        ("1000000", 1_000_000),
    ],
)
def test_a_size_has_a_unit(text, num_bytes):
    assert parse_size("--memory", text) == num_bytes


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("much", "is not a size"),
        ("4XB", "is not a size"),
        ("-1GB", "is not a size"),
        ("0GB", "is too small"),
        ("4", "has no unit"),
        ("4i", "not a"),
    ],
)
def test_what_is_no_size_is_refused_with_an_example(text, complaint):
    with pytest.raises(ConfigError, match=rf"--memory {text} .*{complaint}.*4GB"):
        parse_size("--memory", text)


def test_the_gpu_is_used_when_there_is_one_and_nothing_else_was_asked_for(monkeypatch):
    monkeypatch.setattr(trainer, "pick_device", lambda: torch.device("cuda"))
    assert chosen_device(None).type == "cuda"
    assert chosen_device("cpu").type == "cpu"


@pytest.mark.parametrize("command", ["train", "reference", "eval", "worker", "stage", "serve", "demo"])
def test_a_device_that_is_not_here_is_refused_before_anything_starts(run, trained, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    given = {
        "train": ["--preset", "tiny", "--out", "run"],
        "reference": ["--preset", "tiny", "--out", "run"],
        "worker": ["bt://127.0.0.1:1/#a-token-for-nobody-at-all"],
        "demo": ["--dir", "demo"],
    }.get(command, [trained[0]])
    for options, complaint in (
        (["--device", "abacus"], "--device abacus is not the name of a device: give cpu, cuda"),
        (["--device", "xpu"], "--device xpu cannot be used"),
        (["--threads", 0], "--threads 0"),
    ):
        result = run(command, *given, *options)
        assert result.exit_code == 2
        assert complaint in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_shell_completes_the_names_of_presets():
    words = {"_BLOCKTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "blocktrain train --preset w", "COMP_CWORD": "3"}
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'blocktrain'; from blocktrain.__main__ import main; main()",
    ]
    completed = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True)
    assert completed.stdout.split() == ["wikitext"]


def test_training_says_on_which_device_it_runs(run, tiny):
    result = run("train", *tiny, "--device", "cpu", "--threads", 1)
    assert result.exit_code == 0
    assert ", on cpu" in result.stderr
