"""Run directories on a real disk. Faults are injected: the disk refuses a write, or a process ends at its n-th
rename or sync."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from blocktrain.errors import CheckpointError, StorageError
from blocktrain.io.checkpoint import RunDirectory, copy_as
from blocktrain.io.manifest import Manifest
from blocktrain.presets import PRESETS
from blocktrain.spec import Denoise, RunSpec, TrainSpec, load_spec, preset

SPEC = preset("tiny")
SHAPES = {"w": (2, 2)}
OLD, NEW = {"w": torch.zeros(2, 2)}, {"w": torch.ones(2, 2)}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", SPEC, corpus_sha256="c0")


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {".lock"}


def the_block_file(run: RunDirectory) -> Path:
    (path,) = run.path.glob("block-0-*.safetensors")
    return path


def exit_codes(*actions: Callable[[], object]) -> list[int | None]:
    """Runs each action in its own process, all at the same time."""
    processes = [multiprocessing.get_context("fork").Process(target=action) for action in actions]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def killed(function: str, call: int, action: Callable[[], object]) -> bool:
    """Runs the action in a process that ends at the given call of os.<function>. Returns whether it got that far."""
    real, calls = getattr(os, function), count()

    def planned(*arguments: object) -> object:
        return os._exit(9) if next(calls) == call else real(*arguments)

    def run_to_the_end() -> None:
        setattr(os, function, planned)
        action()

    return exit_codes(run_to_the_end) == [9]


forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_a_file_where_the_folder_should_be_is_a_storage_error(tmp_path):
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(StorageError, match=r"run cannot be written \(File exists\)"):
        RunDirectory.create(tmp_path / "run", SPEC, "c0")


SPECS = [*PRESETS.values(), RunSpec(train=TrainSpec(steps=(3, 2, 1))), RunSpec(name='a "b"\n\\c é')]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name.split()[0])
def test_the_spec_of_a_directory_reads_back_equal(tmp_path, spec):
    RunDirectory.create(tmp_path, spec, "c0")
    assert load_spec(tmp_path / "spec.toml") == spec
    assert RunDirectory.open(tmp_path).spec == spec


def test_the_same_run_continues_in_its_directory(run):
    run.save_block(0, NEW, steps=5)
    again = RunDirectory.create(run.path, SPEC, "c0")
    assert again.manifest().blocks[0].steps == 5


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"model.width": 64, "train.steps": 9}, r"run with model.width = 32 and this run has model.width = 64: use"),
        ({"objective": Denoise()}, r'objective.kind = "stacked" and this run has objective.kind = "denoise"'),
        ({"corpus.source": "x"}, r'corpus.source = "sotu" and .* = "x": use the same settings, or another --out'),
        ({"model.layers": [1, 1, 1, 1]}, r"model.layers = 4 and this run has model.layers = \[1, 1, 1, 1\]"),
    ],
)
def test_another_spec_is_refused_by_its_first_different_key(run, change, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        RunDirectory.create(run.path, SPEC.with_(**change), "c0")
    assert RunDirectory.open(run.path).spec == SPEC


def test_a_setting_that_only_one_spec_has_is_nothing_in_the_other(tmp_path):
    spec = RunSpec()
    RunDirectory.create(tmp_path, spec, "c0")
    shared = spec.with_(**{"model.physical_layers": [1, 2, 1, 1]})
    with pytest.raises(CheckpointError, match=r"model.physical_layers = nothing and .* model.physical_layers = \[1"):
        RunDirectory.create(tmp_path, shared, "c0")


def test_another_corpus_is_refused(run):
    with pytest.raises(CheckpointError, match=r"trained on other text \(sha256 c0…\) .* \(c1…\): restore the text"):
        RunDirectory.create(run.path, SPEC, corpus_sha256="c1")


@pytest.mark.parametrize("removed", ["spec.toml", "manifest.json"])
def test_a_folder_without_its_papers_is_no_run_directory(run, removed):
    (run.path / removed).unlink()
    with pytest.raises(CheckpointError, match=rf"is not a run directory, it has no {removed}: give the --out"):
        RunDirectory.open(run.path)


@pytest.mark.parametrize(
    "name, text, complaint",
    [
        ("manifest.json", "{", r"manifest.json is damaged .*: restore it"),
        ("manifest.json", '{"spec_sha256": "a"}', r"manifest.json is damaged \(Field required\)"),
        ("spec.toml", "seed = ", r"the spec of a run directory cannot be read: .*spec.toml"),
        ("spec.toml", 'name = "changed"', r"spec.toml is not the spec that the blocks beside it were trained with"),
    ],
)
def test_damaged_papers_are_named(run, name, text, complaint):
    (run.path / name).write_text(text)
    with pytest.raises(CheckpointError, match=complaint):
        RunDirectory.open(run.path)


def test_a_block_comes_back_and_its_old_version_goes(run):
    run.save_block(0, OLD, steps=1)
    run.save_block(0, NEW, steps=2)
    assert torch.equal(run.load_block(0, SHAPES)["w"], NEW["w"])
    assert run.manifest().blocks[0].steps == 2
    assert files(run.path) == {"spec.toml", "manifest.json", the_block_file(run).name}


def test_saving_a_block_twice_changes_nothing(run):
    run.save_block(0, NEW, steps=2)
    before = {name: (run.path / name).read_bytes() for name in files(run.path)}
    run.save_block(0, NEW, steps=2)
    assert {name: (run.path / name).read_bytes() for name in files(run.path)} == before


def test_a_block_that_was_not_trained_is_named(run):
    run.save_block(1, NEW, steps=2)
    with pytest.raises(CheckpointError, match=r"run has no trained block 0 \(it has 1\): run blocktrain train"):
        run.load_block(0, SHAPES)


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda data: data[:-1], r"block-0-\w+.safetensors is damaged \(sha256 .*: train block 0 again"),
        (lambda data: data[:-1] + b"\x01", r"block-0-\w+.safetensors is damaged \(sha256 .*: train block 0 again"),
        (lambda data: b"", r"block-0-\w+.safetensors is damaged"),
    ],
    ids=["truncated", "one byte changed", "empty"],
)
def test_a_damaged_block_is_refused(run, damage, complaint):
    run.save_block(0, NEW, steps=2)
    path = the_block_file(run)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=complaint):
        run.load_block(0, SHAPES)


def test_a_deleted_block_file_is_named(run):
    run.save_block(0, NEW, steps=2)
    the_block_file(run).unlink()
    with pytest.raises(CheckpointError, match=r"block-0-\w+.safetensors is missing: train block 0 again"):
        run.load_block(0, SHAPES)


def test_a_block_of_another_shape_is_refused(run):
    run.save_block(0, NEW, steps=2)
    with pytest.raises(CheckpointError, match=r'block-0-\w+.safetensors: tensor "w" has shape \(2, 2\) and \(3,\)'):
        run.load_block(0, {"w": (3,)})


def test_a_block_replaced_while_it_is_read_is_read_anew(run, monkeypatch):
    run.save_block(0, OLD, steps=1)
    real = Path.read_bytes

    def replaced_meanwhile(path: Path) -> bytes:
        if path.name.startswith("block-"):
            monkeypatch.setattr(Path, "read_bytes", real)
            RunDirectory.open(run.path).save_block(0, NEW, steps=2)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", replaced_meanwhile)
    assert torch.equal(run.load_block(0, SHAPES)["w"], NEW["w"])


@forks
@pytest.mark.parametrize(
    "function, call, steps",
    [
        ("fsync", 0, 1),
        ("replace", 0, 1),
        ("fsync", 1, 1),
        ("fsync", 2, 1),
        ("replace", 1, 1),
        ("fsync", 3, 2),
        ("unlink", 0, 2),
    ],
)
def test_a_kill_at_any_instant_of_saving_a_block_leaves_a_whole_one(run, function, call, steps):
    run.save_block(0, OLD, steps=1)
    assert killed(function, call, lambda: run.save_block(0, NEW, steps=2))
    again = RunDirectory.create(run.path, SPEC, "c0")
    assert again.manifest().blocks[0].steps == steps
    assert torch.equal(again.load_block(0, SHAPES)["w"], (OLD if steps == 1 else NEW)["w"])


@forks
@pytest.mark.parametrize("call", [0, 1])
def test_a_kill_at_any_instant_of_creation_leaves_a_directory_that_can_be_created(tmp_path, call):
    assert killed("replace", call, lambda: RunDirectory.create(tmp_path, SPEC, "c0"))
    RunDirectory.create(tmp_path, SPEC, "c0").save_block(0, NEW, steps=1)
    assert RunDirectory.open(tmp_path).manifest().blocks.keys() == {0}


@forks
def test_what_a_killed_process_left_behind_is_cleared(run):
    run.save_progress(0, OLD, {})
    assert killed("replace", 0, lambda: run.save_progress(0, NEW, {}))
    assert killed("replace", 0, lambda: run.save_combine("evidence", [1.0]))
    assert len(files(run.path)) == 5
    RunDirectory.create(run.path, SPEC, "c0")
    assert files(run.path) == {"spec.toml", "manifest.json", "progress/phase-0.safetensors"}


def test_a_version_that_no_manifest_names_goes_with_the_next_save(run):
    (run.path / "block-0-0123456789ab.safetensors").write_bytes(b"orphan")
    run.save_block(0, NEW, steps=1)
    assert the_block_file(run).read_bytes() != b"orphan"


@forks
def test_processes_that_save_at_once_lose_no_block(run):
    saves = [partial(run.save_block, block, NEW, steps=block) for block in range(4)]
    assert exit_codes(*saves) == [0, 0, 0, 0]
    assert {block: entry.steps for block, entry in run.manifest().blocks.items()} == {0: 0, 1: 1, 2: 2, 3: 3}


def test_progress_comes_back_until_it_is_cleared(run):
    assert run.load_progress(0) is None
    run.save_progress(0, NEW, {"step": "7"})
    tensors, metadata = run.load_progress(0) or ({}, {})
    assert torch.equal(tensors["w"], NEW["w"])
    assert metadata == {"step": "7"}
    run.clear_progress(0)
    run.clear_progress(0)
    assert run.load_progress(0) is None


def test_damaged_progress_tells_how_to_go_on(run):
    run.save_progress(1, NEW, {})
    (run.path / "progress" / "phase-1.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"phase-1.safetensors: .*: delete it to train this phase from its start"):
        run.load_progress(1)


def test_the_weights_of_a_composition_are_kept_until_a_block_changes(run):
    run.save_block(0, OLD, steps=1)
    run.save_combine("evidence", torch.tensor([0.25, 0.75]).tolist())
    run.save_block(0, OLD, steps=1)
    assert run.manifest().combine == {"evidence": (0.25, 0.75)}
    run.save_block(0, NEW, steps=2)
    assert run.manifest().combine == {}


def test_a_manifest_reads_back_equal(run):
    run.save_block(3, NEW, steps=1)
    run.save_combine("evidence", [1 / 3])
    assert Manifest.model_validate_json(run.manifest().model_dump_json()) == run.manifest()


def test_a_manifest_of_an_older_version_is_read(run):
    path = run.path / "manifest.json"
    path.write_text(path.read_text().replace("spec_toml_sha256", "spec_sha256"))
    assert RunDirectory.open(run.path).manifest() == run.manifest()
    run.save_block(0, NEW, steps=1)
    assert "spec_toml_sha256" in path.read_text()


def test_metrics_come_back_in_order(run):
    assert run.metrics() == []
    run.log({"step": 1, "loss": 5.5})
    run.log({"step": 2, "loss": 5.25})
    assert run.metrics() == [{"step": 1, "loss": 5.5}, {"step": 2, "loss": 5.25}]


@pytest.mark.parametrize("half", [b'{"step": 2, "lo', b'{"step": 2, "name": "\xc3', b"17"])
def test_a_line_cut_short_costs_only_itself(run, half):
    run.log({"step": 1})
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(half)
    assert run.metrics() == [{"step": 1}]
    run.log({"step": 3})
    assert run.metrics() == [{"step": 1}, {"step": 3}]


def test_a_block_can_be_used_where_it_lies(run):
    run.save_block(0, NEW, steps=1)
    mapped = run.map_block(0, SHAPES)
    run.save_block(0, OLD, steps=2)
    assert torch.equal(mapped.tensors["w"], NEW["w"])


def test_a_damaged_block_is_not_mapped(run):
    run.save_block(0, NEW, steps=1)
    path = the_block_file(run)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"is damaged \(sha256 .*train block 0 again"):
        run.map_block(0, SHAPES)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"is missing: train block 0 again"):
        run.map_block(0, SHAPES)


def test_a_model_directory_can_be_copied_in_half_precision(run, tmp_path):
    run.save_block(0, {**NEW, "gain": torch.full((2,), 1 / 3)}, steps=7)
    run.finish_phase(0, {}, steps=7)
    run.save_combine("stack", [0.25, 0.75])
    shapes = {**SHAPES, "gain": (2,)}
    half = copy_as(run, tmp_path / "half", torch.float16, lambda _: shapes)
    tensors = half.load_block(0, shapes)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {"w": torch.float16, "gain": torch.float32}
    assert torch.equal(tensors["w"].float(), NEW["w"])
    assert half.manifest().combine == {"stack": (0.25, 0.75)}
    assert (half.manifest().finished, half.manifest().blocks[0].steps) == ((0,), 7)
