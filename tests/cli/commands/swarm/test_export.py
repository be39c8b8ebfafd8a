"""blocktrain export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


def test_an_exported_model_can_be_measured_and_writes(run, finished, tmp_path):
    for _ in range(2):  # the second renews the first
        result = run("export", finished.invite, tmp_path / "model", "--home", finished.home)
        assert result.exit_code == 0, result.stderr
        assert "training is finished" in result.stdout
    assert f"next: blocktrain eval {tmp_path / 'model'} --corpus PATH-OF-text.txt" in result.stderr
    measured = run("eval", tmp_path / "model", "--json", "--corpus", finished.text).stdout
    scores = json.loads(measured)["runs"][0]["scores"]
    assert scores[-1]["reading"] == "combined"
    assert run("generate", tmp_path / "model", "--max-bytes", 5).exit_code == 0


def test_an_export_remembers_its_text_by_name_and_hash_and_no_path(run, finished, tmp_path, monkeypatch):
    assert run("export", finished.invite, tmp_path / "model", "--home", finished.home).exit_code == 0
    for path in (tmp_path / "model").iterdir():
        assert str(finished.text.parent).encode() not in path.read_bytes()
    monkeypatch.chdir(tmp_path)
    result = run("eval", tmp_path / "model")
    assert result.exit_code == 2
    assert 'was trained on the text "text.txt" (sha256 ' in result.stderr
    assert "which is not here: name the file or folder with --corpus PATH" in result.stderr
    assert "name the file or folder with --corpus PATH" in result.stderr
    monkeypatch.chdir(finished.text.parent)
    assert run("eval", tmp_path / "model").exit_code == 0  # where the text is, its name is enough


def test_a_model_can_be_exported_in_half_the_bytes(run, finished, tmp_path):
    for precision in ("float32", "float16"):
        options = ("--precision", precision, "--home", finished.home)
        assert run("export", finished.invite, tmp_path / precision, *options).exit_code == 0
    whole, half = (
        sum(path.stat().st_size for path in (tmp_path / precision).glob("block-*"))
        for precision in ("float32", "float16")
    )
    assert half < 0.55 * whole
    assert run("generate", tmp_path / "float16", "--max-bytes", 5).exit_code == 0


def test_a_swarm_s_model_goes_straight_to_transformers(run, finished, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra: pip install 'blocktrain[hf]'")
    result = run("export", finished.invite, "--hf", tmp_path / "hf", "--home", finished.home)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_an_early_export_says_which_blocks_do_not_exist_yet(run, tmp_path, open_tiny, serve):
    with open_tiny() as early:
        early.coordinator.loop.tick()
        with serve(early) as invite:
            result = run("export", invite, tmp_path / "model", "--home", tmp_path)
            assert "not open yet" in run("status", invite).stdout
    assert result.exit_code == 0, result.stderr
    assert "blocks 2 and 3 of 4 do not exist yet" in result.stderr
    assert "blocks 0 (version 0), 1 (version 0); training continues" in result.stdout


@pytest.mark.parametrize("evaluated, kept", [(0, {"stack": [0.25, 0.75]}), (7, {})], ids=["these", "others"])
def test_an_export_has_the_composition_s_weights_only_of_its_own_versions(
    run, tmp_path, open_tiny, serve, evaluated, kept
):
    with open_tiny(**{"model.blocks": 2}) as early:
        early.ledger.see_worker("a" * 64, "ada", "cpu", 1, 1.0, now_s=1.0, nonce=1)
        early.coordinator.loop.tick()
        lease = early.ledger.grant_evaluation("a" * 64, {0: evaluated, 1: evaluated}, 1.0, 60.0)
        early.ledger.record_evaluation(lease.id, "valid", [], {"stack": (0.25, 0.75)}, 2.0)
        with serve(early) as invite:
            result = run("export", invite, tmp_path / "model", "--home", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["combine"] == kept


@pytest.mark.parametrize(
    "trained_here, words",
    [(True, "holds a run that was trained here: name another directory for the download"), (False, "holds a run with")],
)
def test_an_export_replaces_no_other_model(run, finished, trained, tmp_path, trained_here, words):
    folder = Path(shutil.copytree(trained[0], tmp_path / "copy"))
    if not trained_here:
        (folder / "metrics.jsonl").unlink()
    before = sorted(folder.iterdir())
    result = run("export", finished.invite, folder, "--home", finished.home)
    assert result.exit_code == 2
    assert words in result.stderr
    assert sorted(folder.iterdir()) == before
