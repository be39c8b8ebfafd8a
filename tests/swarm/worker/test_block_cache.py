"""The files of a worker's cache; test_worker.py tests what a worker fetches and what it makes itself."""

import os

from blocktrain.swarm.worker.block_cache import prune_cache


def test_a_cached_blob_is_removed_when_it_is_neither_needed_nor_new(tmp_path):
    for name, age_s in {"needed": 100, "old": 100, "new": 1}.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (1000 - age_s, 1000 - age_s))
    prune_cache(tmp_path, {"needed"}, before_s=940)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["needed", "new"]


def test_a_cache_that_does_not_exist_needs_no_pruning(tmp_path):
    prune_cache(tmp_path / "blobs", set(), before_s=0.0)
