"""The run directory: the spec, one checkpoint file per trained block, and the progress of unfinished phases.
Knows tensors by name and shape only: no model, no training. Next: tensor_file.py, one file of tensors; files.py, which
writes files whole or not at all; train/run.py, which fills a directory.

    run/
      spec.toml                        what is trained
      manifest.json                    names the current file of each block; always written last
      block-0-1f3a52c09b7e.safetensors named by its hash, so that a new version never replaces the one in use
      drafter-1-90ab12cd34ef.safetensors behind block 1, if one was distilled
      progress/phase-0.safetensors     state of an unfinished phase
      metrics.jsonl                    one record per line
      samples.jsonl                    what the model wrote while it was trained
      tokenizer.json                   unless the run is on bytes
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import tomli_w
import torch
from filelock import FileLock
from pydantic import ValidationError
from torch import Tensor

from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.files import make_folder, storage_errors, write_whole
from blocktrain.io.manifest import BlockEntry, Manifest
from blocktrain.io.private import LEDGER_FILE, MANIFEST_FILE, METRICS_FILE
from blocktrain.io.records import append_record, read_records
from blocktrain.io.tensor_file import (
    MappedTensors,
    damage_in,
    from_bytes,
    load_tensors,
    read_file,
    save_tensors,
    stored_as,
    to_bytes,
    unreadable,
)
from blocktrain.settings import TOKENIZER_FILE
from blocktrain.spec import RunSpec, first_difference, load_spec, settings_of
from blocktrain.wire.safetensors import Shapes

SPEC_FILE = "spec.toml"
SAMPLES_FILE = "samples.jsonl"


class RunDirectory:
    """One run on disk. Several processes may use it: every change holds the directory's lock; reading needs no lock."""

    def __init__(self, path: Path, spec: RunSpec) -> None:
        self.path = path
        self.spec = spec

    @classmethod
    def create(cls, path: str | Path, spec: RunSpec, corpus_sha256: str) -> Self:
        """A new directory, or the existing one if it has the same spec and corpus."""
        path = Path(path)
        if (path / LEDGER_FILE).is_file():
            raise CheckpointError(f"{path} is the directory of a coordinator: choose another directory")
        make_folder(path)
        run = cls(path, spec)
        with run._lock():
            run._remove_leftovers()
            if (path / SPEC_FILE).exists():
                _require_same_spec(path, _read_spec(path), spec)
            else:
                write_whole(path / SPEC_FILE, tomli_w.dumps(settings_of(spec)).encode())
            if (path / MANIFEST_FILE).exists():
                _require_same_corpus(path, run.manifest().corpus_sha256, corpus_sha256)
            else:
                run._write_manifest(Manifest(spec_toml_sha256=run._spec_toml_sha256(), corpus_sha256=corpus_sha256))
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        path = Path(path)
        for name in (SPEC_FILE, MANIFEST_FILE):
            if not (path / name).is_file():
                if (path / LEDGER_FILE).is_file():
                    raise CheckpointError(
                        f"{path} is the directory of a coordinator, which holds no model: download its model with "
                        f"blocktrain export {path} model/, then give model/"
                    )
                what = "it is a file" if path.exists() else "it does not exist"
                lack = f"it has no {name}" if path.is_dir() else what
                raise CheckpointError(
                    f"{path} is not a run directory, {lack}: give the --out of blocktrain train, or a model that "
                    f"blocktrain export has downloaded"
                )
        run = cls(path, _read_spec(path))
        if run.manifest().spec_toml_sha256 != run._spec_toml_sha256():
            raise CheckpointError(
                f"{path / SPEC_FILE} is not the spec that the blocks beside it were trained with: "
                f"undo the change to it, or train again into another --out"
            )
        return run

    def manifest(self) -> Manifest:
        """Read again on each call, because other processes save blocks too."""
        path = self.path / MANIFEST_FILE
        try:
            return Manifest.model_validate_json(read_file(path))
        except ValidationError as error:
            detail = error.errors()[0]["msg"]
            raise CheckpointError(
                f"{path} is damaged ({detail}): restore it, or train again into another --out"
            ) from None

    def save_block(self, block: int, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Save a new version of one block."""
        self.publish({block: tensors}, steps)

    def finish_phase(self, phase: int, blocks: Mapping[int, Mapping[str, Tensor]], steps: int) -> None:
        """Save the blocks that a phase trained and mark the phase as finished: both or neither."""
        self.publish(blocks, steps, finished=phase)

    def publish(self, blocks: Mapping[int, Mapping[str, Tensor]], steps: int, finished: int | None = None) -> None:
        """Writes the files, then the manifest that names them, then deletes the old files. A kill at any point leaves
        whole versions. If a block changed, the weights of the composition and the drafters are dropped: they were
        fitted to the old one."""
        entries = {}
        with self._lock():
            old = self.manifest()
            for block, tensors in blocks.items():
                data = to_bytes(tensors, {"block": str(block), "steps": str(steps)})
                entries[block] = BlockEntry(sha256=hashlib.sha256(data).hexdigest(), steps=steps)
                write_whole(self._block_file(block, entries[block]), data)
            current = {**old.blocks, **entries}
            done = tuple(sorted({*old.finished, *([] if finished is None else [finished])}))
            fitted: dict[str, Any] = {} if current == old.blocks else {"combine": {}, "drafters": {}}
            self._write_manifest(old.model_copy(update={"blocks": current, "finished": done, **fitted}))
            for block, entry in entries.items():
                self._remove_old_versions(block, entry)
            if fitted:
                self._remove_others("drafter-*.safetensors", ())

    def load_block(self, block: int, expected: Shapes) -> dict[str, Tensor]:
        path, data = self._read_block(block)
        return from_bytes(data, path, expected, _again(block))[0]

    def map_block(self, block: int, expected: Shapes) -> MappedTensors:
        """The tensors of a block, left in their file, for blocks larger than the memory. Checked like loaded ones."""
        entry = self._entry(block)
        path = self._block_file(block, entry)
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            _require_hash(path, block, found, entry)
            with damage_in(path, _again(block)):
                return MappedTensors(path, expected)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._entry(block) != entry:
                return self.map_block(block, expected)
            raise unreadable(path, error, _again(block)) from None

    def save_drafter(self, behind: int, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Save what the stage that ends with block `behind` drafts with."""
        data = to_bytes(tensors, {"drafter": str(behind), "steps": str(steps)})
        entry = BlockEntry(sha256=hashlib.sha256(data).hexdigest(), steps=steps)
        with self._lock():
            old = self.manifest()
            write_whole(self._drafter_file(behind, entry), data)
            self._write_manifest(old.model_copy(update={"drafters": {**old.drafters, behind: entry}}))
            self._remove_others(f"drafter-{behind}-*.safetensors", [self._drafter_file(behind, entry)])

    def load_drafter(self, behind: int, expected: Shapes) -> dict[str, Tensor] | None:
        """None if there is none behind this block."""
        entry = self.manifest().drafters.get(behind)
        if entry is None:
            return None
        path, remedy = self._drafter_file(behind, entry), f"run blocktrain distil {self.path} again"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise unreadable(path, error, remedy) from None
        if (found := hashlib.sha256(data).hexdigest()) != entry.sha256:
            raise CheckpointError(
                f"{path} is damaged (sha256 {found[:12]}… where the manifest says {entry.sha256[:12]}…): {remedy}"
            )
        return from_bytes(data, path, expected, remedy)[0]

    def save_tokenizer(self, file: bytes | None) -> None:
        """The tokenizer's file, so that the directory can be used without its corpus. None: the run is on bytes."""
        if file is not None and not (self.path / TOKENIZER_FILE).exists():
            write_whole(self.path / TOKENIZER_FILE, file)

    def tokenizer_file(self) -> bytes | None:
        expected, path = self.spec.corpus.tokenizer_sha256, self.path / TOKENIZER_FILE
        if expected is None:
            return None
        data = read_file(path)
        if hashlib.sha256(data).hexdigest() != expected:
            raise CheckpointError(
                f"{path} is not the tokenizer that the run was trained with: copy tokenizer.json of its prepared corpus"
            )
        return data

    def save_progress(self, phase: int, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        make_folder(self.path / "progress")
        with self._lock():
            save_tensors(self.progress_file(phase), tensors, metadata)

    def load_progress(self, phase: int) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The saved state of a phase; None if it has not started or is finished."""
        path = self.progress_file(phase)
        if not path.exists():
            return None
        return load_tensors(path, remedy="delete it to train this phase from its start")

    def clear_progress(self, phase: int) -> None:
        with self._lock(), storage_errors(self.progress_file(phase)):
            self.progress_file(phase).unlink(missing_ok=True)

    def save_combine(self, name: str, weights: Sequence[float]) -> None:
        with self._lock():
            old = self.manifest()
            combine = {**old.combine, name: tuple(float(weight) for weight in weights)}
            self._write_manifest(old.model_copy(update={"combine": combine}))

    def log(self, record: dict[str, Any], file_name: str = METRICS_FILE) -> None:
        append_record(self.path / file_name, record)

    def samples(self) -> list[dict[str, Any]]:
        """The records of what the model wrote while it was trained, in order."""
        return [record for record in self.metrics(SAMPLES_FILE) if {"at_s", "samples"} <= record.keys()]

    def metrics(self, file_name: str = METRICS_FILE) -> list[dict[str, Any]]:
        return read_records(self.path / file_name)

    def _spec_toml_sha256(self) -> str:
        return hashlib.sha256(read_file(self.path / SPEC_FILE)).hexdigest()

    def _read_block(self, block: int) -> tuple[Path, bytes]:
        """The current file of a block, with its hash checked. If it is replaced meanwhile, the new one is read."""
        entry = self._entry(block)
        path = self._block_file(block, entry)
        try:
            data = path.read_bytes()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._entry(block) != entry:
                return self._read_block(block)
            raise unreadable(path, error, _again(block)) from None
        _require_hash(path, block, hashlib.sha256(data).hexdigest(), entry)
        return path, data

    def _entry(self, block: int) -> BlockEntry:
        blocks = self.manifest().blocks
        if block not in blocks:
            raise CheckpointError(
                f"{self.path} has no trained block {block} (it has {_listing(blocks)}): "
                f"run blocktrain train with --out {self.path} first"
            )
        return blocks[block]

    def _block_file(self, block: int, entry: BlockEntry) -> Path:
        return self.path / f"block-{block}-{entry.sha256[:12]}.safetensors"

    def progress_file(self, phase: int) -> Path:
        return self.path / "progress" / f"phase-{phase}.safetensors"

    def _write_manifest(self, manifest: Manifest) -> None:
        write_whole(self.path / MANIFEST_FILE, manifest.model_dump_json(indent=2).encode())

    def _drafter_file(self, behind: int, entry: BlockEntry) -> Path:
        return self.path / f"drafter-{behind}-{entry.sha256[:12]}.safetensors"

    def _remove_old_versions(self, block: int, current: BlockEntry) -> None:
        self._remove_others(f"block-{block}-*.safetensors", [self._block_file(block, current)])

    def _remove_others(self, pattern: str, kept: Sequence[Path]) -> None:
        for path in self.path.glob(pattern):
            if path not in kept:
                with storage_errors(path):
                    path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Delete the temporary files of a killed process. No other process writes while this one holds the lock."""
        for path in (*self.path.glob(".*.tmp"), *self.path.glob("progress/.*.tmp")):
            with storage_errors(path):
                path.unlink(missing_ok=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        lock = FileLock(self.path / ".lock")
        with storage_errors(self.path / ".lock"):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def copy_as(source: RunDirectory, path: Path, dtype: torch.dtype, shapes: Callable[[int], Shapes]) -> RunDirectory:
    """A copy in another precision, made block by block. `shapes` gives the shapes of a block. The weights of the
    composition are copied unchanged."""
    manifest = source.manifest()
    target = RunDirectory.create(path, source.spec, manifest.corpus_sha256)
    target.save_tokenizer(source.tokenizer_file())
    for block, entry in manifest.blocks.items():
        target.save_block(block, stored_as(source.load_block(block, shapes(block)), dtype), entry.steps)
    for phase in manifest.finished:
        target.finish_phase(phase, {}, source.spec.phases[phase].steps)
    for name, weights in manifest.combine.items():
        target.save_combine(name, weights)
    for behind, entry in manifest.drafters.items():
        if (drafter := source.load_drafter(behind, shapes(behind + 1))) is not None:
            target.save_drafter(behind, stored_as(drafter, dtype), entry.steps)
    return target


def _again(block: int) -> str:
    return f"train block {block} again, or restore the file"


def _require_hash(path: Path, block: int, found: str, entry: BlockEntry) -> None:
    if found != entry.sha256:
        raise CheckpointError(
            f"{path} is damaged (sha256 {found[:12]}… where the manifest says {entry.sha256[:12]}…): {_again(block)}"
        )


def _read_spec(path: Path) -> RunSpec:
    try:
        return load_spec(path / SPEC_FILE, warn=False)
    except ConfigError as error:
        raise CheckpointError(f"the spec of a run directory cannot be read: {error}, or use another --out") from None


def _require_same_spec(path: Path, there: RunSpec, wanted: RunSpec) -> None:
    if different := first_difference(there, wanted):
        raise CheckpointError(
            f"{path} {different}: use the same settings, or another --out; to train its model further, give --from "
            f"{path} and another --out"
        )


def _require_same_corpus(path: Path, there: str, wanted: str) -> None:
    if there != wanted:
        raise CheckpointError(
            f"{path} was trained on other text (sha256 {there[:12]}…) than the corpus now holds ({wanted[:12]}…): "
            f"restore the text, or use another --out"
        )


def _listing(blocks: Mapping[int, BlockEntry]) -> str:
    return ", ".join(map(str, sorted(blocks))) or "none"
