"""blocktrain fleet refuses what cannot work, without starting anything. tests/e2e/test_fleet.py runs fleets."""

from __future__ import annotations

import pytest

from blocktrain.fleet import cluster

NOBODY = ["--ray", "127.0.0.1:1"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["up", *NOBODY], "no settings were given"),
        (["up", "--preset", "tiny", "--workers", 0, *NOBODY], "--workers 0 is too small"),
        (["up", "--preset", "tiny", "--stages", 9, *NOBODY], "--stages 9 does not fit a model of 4 blocks"),
        (["up", "--preset", "tiny", "--memory", "much", *NOBODY], "--memory much is not a size"),
        (["up", "--preset", "tiny", "--cpus", 0, *NOBODY], "--cpus 0 is too small"),
        (["up", "--preset", "tiny", "--name", "My Fleet", *NOBODY], "is not a valid fleet name"),
        (["up", "--preset", "tiny", "--ledger", "postgresql://me:x@db/run", *NOBODY], "--ledger holds a password"),
        (["up", "--preset", "tiny", *NOBODY], "no Ray cluster answers at 127.0.0.1:1 (Connection refused): run this"),
        (["status", *NOBODY], "no Ray cluster answers at 127.0.0.1:1"),
        (["scale", "--workers", -1, *NOBODY], "--workers -1 is too small"),
        (["scale", "--workers", 2, *NOBODY], "no Ray cluster answers at 127.0.0.1:1"),
        (["down", *NOBODY], "no Ray cluster answers at 127.0.0.1:1"),
        (["down", "--grace", 0, *NOBODY], "--grace 0 is too small"),
        (["status", "--ray", "ray://head:10001"], "is not the address of a Ray cluster: give HOST:PORT, or auto"),
    ],
)
def test_bad_input_gets_one_sentence_with_the_remedy(run, arguments, sentence):
    result = run("fleet", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_ray_the_extra_is_named(run, monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    result = run("fleet", "status")
    assert result.exit_code == 2
    assert "pip install 'blocktrain[ray]'" in result.stderr
