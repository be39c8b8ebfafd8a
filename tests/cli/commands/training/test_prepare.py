"""blocktrain prepare and inspect, and the other commands on a prepared corpus."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.cli.shared.block_source import open_source
from blocktrain.data.shards import PreparedCorpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.text import generate, load_run_tokenizer, score_text
from blocktrain.train.run import load_model

SPLIT = ["--valid-share", 0.15, "--test-share", 0.15]
TINY = ["--preset", "tiny", "--set", "train.steps=3"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a source, its corpus and a run on it."""
    from typer.testing import CliRunner

    from blocktrain.cli.main import app

    folder = tmp_path_factory.mktemp("prepared")
    rows = [{"text": f"{n} bottles of beer on wall {n * n}, and {n * n * n} bottles. " * 5} for n in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in (
        ["prepare", folder / "rows.jsonl", *SPLIT, "--tokenizer", "bpe:320", "--out", folder / "corpus"],
        ["train", *TINY, "--corpus", folder / "corpus", "--out", folder / "run"],
    ):
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert result.exit_code == 0, result.output
    return folder


def test_prepare_prints_what_the_corpus_holds_and_inspect_the_same(run, prepared):
    result = run("prepare", prepared / "rows.jsonl", *SPLIT, "--tokenizer", "bpe:320", "--out", prepared / "corpus")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == run("inspect", prepared / "corpus", "--check").stdout
    assert "tokenizer bpe:320, 320 tokens" in result.stdout
    assert "|" in result.stdout.splitlines()[-1]
    assert max(map(len, result.stdout.splitlines())) < 80


def test_prepare_warns_about_json_in_a_text_file(run, tmp_path):
    rows = [{"text": f"{n} bottles of beer on wall {n * n}. " * 9} for n in range(40)]
    (tmp_path / "rows.txt").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("prepare", tmp_path / "rows.txt", "--out", tmp_path / "corpus")
    assert result.exit_code == 0, result.stderr
    assert "warning: the text rows.txt holds JSON lines with the fields 'text'" in result.stderr


def test_inspect_of_a_corpus_without_one_of_its_shards_is_refused(run, prepared, tmp_path):
    shutil.copytree(prepared / "corpus", tmp_path / "corpus")
    next((tmp_path / "corpus" / "shards").iterdir()).unlink()
    result = run("inspect", tmp_path / "corpus")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is damaged (No such file or directory): restore it from a copy" in result.stderr


def test_inspect_as_json_has_the_sizes_of_every_split(run, prepared):
    facts = json.loads(run("inspect", prepared / "corpus", "--json").stdout)
    train = facts["splits"]["train"]
    assert train["documents"] > 100
    assert train["bytes_per_token"] == pytest.approx(train["text_bytes"] / train["tokens"])
    assert "".join(facts["sample"]) in (prepared / "rows.jsonl").read_text()


def test_a_run_on_tokens_is_measured_in_nats_per_byte_of_the_text(run, prepared):
    document = json.loads(run("eval", prepared / "run", "--json").stdout)
    answer = document["runs"][0]["answer"]
    tokens = PreparedCorpus.open(prepared / "corpus").split("valid")
    windows = (len(tokens) - 1) // 64
    predicted = tokens.take(np.arange(1, windows * 64 + 1))
    assert answer["num_tokens"] == windows * 64
    assert answer["num_bytes"] == tokens.token_lengths.take(predicted).sum()
    assert answer["nats_per_token"] * answer["num_tokens"] == pytest.approx(
        answer["nats_per_byte"] * answer["num_bytes"]
    )
    assert answer["bits_per_byte"] == pytest.approx(answer["nats_per_byte"] / math.log(2))
    assert "nats/token" in run("eval", prepared / "run", "--max-windows", 2).stdout


def test_the_loss_of_a_step_is_in_nats_per_byte(prepared):
    losses = [record["loss"] for record in RunDirectory.open(prepared / "run").metrics()]
    assert 0 < losses[0] < math.log(320) / 1.5


def test_the_same_command_finds_the_run_finished(run, prepared):
    result = run("train", *TINY, "--corpus", prepared / "corpus", "--out", prepared / "run")
    assert result.exit_code == 0, result.stderr
    assert "is finished: nothing is left to train" in result.stderr


def test_other_text_is_measured_with_the_runs_tokenizer(run, prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"text": f"{n} cans of soup, {n * n} cans. " * 20} for n in range(1000, 1100)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("eval", prepared / "run", "--corpus", tmp_path / "other.jsonl", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["runs"][0]["answer"]["num_bytes"] > 100


def test_generate_writes_the_text_of_its_tokens(run, prepared):
    options = ["--prompt", "7 bottles", "--max-bytes", 40, "--seed", 3]
    result = run("generate", prepared / "run", *options, "--json")
    assert result.exit_code == 0, result.stderr
    opened = RunDirectory.open(prepared / "run")
    model, tokenizer = load_model(opened), load_run_tokenizer(opened)
    expected = generate(model, "7 bottles", 40, seed=3, tokenizer=tokenizer)
    assert json.loads(result.stdout)["text"] == expected
    assert json.loads(result.stdout)["bytes"] == 40
    assert run("generate", prepared / "run", *options).stdout.startswith(f"7 bottles{expected}")


def test_the_smaller_of_both_limits_ends_the_text(run, prepared):
    def written(*options):
        found = json.loads(run("generate", prepared / "run", *options, "--json").stdout)
        return found["bytes"], found["tokens"]

    assert written("--max-tokens", 80, "--max-bytes", 5)[0] == 5
    assert written("--max-tokens", 2, "--max-bytes", 150)[1] == 2
    result = run("generate", prepared / "run", "--max-tokens", 8, "--max-bytes", 0)
    assert "--max-bytes 0 is too small: give 1 or more" in result.stderr


def test_a_stop_string_ends_the_text_inside_a_token(run, prepared):
    whole = json.loads(run("generate", prepared / "run", "--max-bytes", 80, "--json").stdout)["text"]
    stop = whole[20:23]
    found = json.loads(run("generate", prepared / "run", "--max-bytes", 80, "--stop", stop, "--json").stdout)
    assert found["text"] == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    "change, said",
    [
        ("model.table_rank=32", r"tables +32 wide, \d+% of the parameters; leave model.table_rank out to make them"),
        ("model.table_rank=8", r"tables +8 wide, \d+% of the parameters\n"),
        ("seed=1", r"tables +24 wide, \d+% of the parameters; use a smaller vocabulary or a larger model to make them"),
    ],
)
def test_train_says_how_wide_tables_are_and_what_makes_them_smaller(run, prepared, tmp_path, change, said):
    options = [*TINY, "--corpus", prepared / "corpus", "--set", "train.steps=1", "--set", change]
    assert re.search(said, run("train", *options, "--out", tmp_path / "run").stderr)


@pytest.mark.parametrize("mode", ["speculative", "sweep"])
def test_every_mode_writes_tokens(run, prepared, mode):
    options = ["--prompt", "7 bottles", "--max-tokens", 12, "--mode", mode, "--json"]
    first, again = (json.loads(run("generate", prepared / "run", *options).stdout) for _ in range(2))
    assert (first["tokens"], first["text"]) == (12, again["text"])
    assert first["bytes"] >= 12


def test_a_stage_serves_a_run_with_its_tokenizer(prepared):
    segment = open_source(str(prepared / "run"), prepared / "blobs", offload=False).newest(None)
    assert segment.info.tokenizer.sha256 == RunDirectory.open(prepared / "run").spec.corpus.tokenizer_sha256
    assert (segment.info.vocabulary, segment.info.unit) == (320, "tokens")


def test_a_text_is_scored_by_tokens_and_reported_by_bytes(prepared):
    opened = RunDirectory.open(prepared / "run")
    model, tokenizer = load_model(opened), load_run_tokenizer(opened)
    score = score_text(model, "9 bottles of beer", tokenizer=tokenizer)
    assert len(score.nats) == len(tokenizer.encode(b"9 bottles of beer")) < score.num_bytes == 17
    inputs = torch.tensor([[*tokenizer.encode(b"\n").tolist(), *tokenizer.encode(b"9 bottles of beer").tolist()]])
    log_p = model.logits(inputs[:, :-1])[0].log_softmax(-1).gather(1, inputs[0, 1:, None])
    assert score.nats_per_byte == pytest.approx(-log_p.sum().item() / 17, rel=1e-5)


@pytest.mark.parametrize(
    "command, complaint",
    [
        (["train", "--preset", "tiny", "--set", "corpus.tokenizer=bpe:3", "--out", "OUT"], "has no usable size"),
        (["prepare", "CORPUS", "--valid-share", "1.0", "--out", "OUT"], "corpus.valid_share = 1.0"),
        (["prepare", "CORPUS/none", "--out", "OUT"], "is not a file or folder here"),
        (["prepare", "sotu", "--tokenizer", "no.json", "--out", "OUT"], "choose \"bytes\", \"bpe:N\""),
        (["inspect", "RUN"], "is not a prepared corpus, index.json cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_sentence(run, prepared, tmp_path, command, complaint):
    places = {"RUN": prepared / "run", "CORPUS": prepared / "corpus", "OUT": tmp_path / "out"}
    for name, place in places.items():
        command = [word.replace(name, str(place)) for word in command]
    result = run(*command)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("objective", ["denoise", "end_to_end"])
def test_every_objective_trains_on_tokens(run, prepared, tmp_path, objective):
    options = [
        *TINY,
        "--set",
        f"objective.kind={objective}",
        "--corpus",
        prepared / "corpus",
        "--out",
        tmp_path / "run",
    ]
    assert run("train", *options).exit_code == 0
    result = run("eval", tmp_path / "run", "--max-windows", 2, "--json")
    assert json.loads(result.stdout)["runs"][0]["answer"]["nats_per_byte"] < math.log(320)


def test_compare_and_report_work_on_a_source_with_a_tokenizer(run, prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = ["corpus.tokenizer=bpe:300", "corpus.valid_share=0.15", "corpus.test_share=0.15"]
    changes = [word for setting in settings for word in ("--set", setting)]
    options = [*TINY, *changes, "--corpus", prepared / "rows.jsonl", "--max-windows", 2]
    result = run("compare", *options, "--out", tmp_path / "report")
    assert result.exit_code == 0, result.stderr
    assert "warning" not in result.stderr
    assert re.search(r"nats/token: blocks [\d.]+ on valid and [\d.]+ on test, reference [\d.]+ on valid", result.stdout)
    document = json.loads((tmp_path / "report" / "report.json").read_text())
    assert document["blocks"]["settings"]["model"]["vocabulary"] == 300
    assert run("report", tmp_path / "report" / "blocks", "--max-windows", 2, "--no-png").exit_code == 0
    page = (tmp_path / "report" / "blocks" / "report.html").read_text()
    assert "bpe:300" in page
    assert "nats/token" in page


def test_several_processes_train_on_one_prepared_corpus(run, prepared, tmp_path):
    options = [*TINY, "--set", "objective.kind=denoise", "--corpus", prepared / "corpus"]
    for jobs in (1, 2):
        result = run("train", *options, "--jobs", jobs, "--out", tmp_path / str(jobs))
        assert result.exit_code == 0, result.stderr
    blocks = [RunDirectory.open(tmp_path / str(jobs)).manifest().blocks for jobs in (1, 2)]
    assert blocks[0] == blocks[1]


def test_a_runs_tokenizer_that_was_replaced_is_refused(run, prepared, tmp_path):
    import shutil

    shutil.copytree(prepared / "run", tmp_path / "run")
    path = tmp_path / "run" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    result = run("generate", tmp_path / "run")
    assert result.exit_code == 2
    assert "is not the tokenizer that the run was trained with: copy tokenizer.json" in result.stderr
