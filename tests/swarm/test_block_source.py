"""A stage's blocks, from a directory or a coordinator: the newest whole version, and only its own blocks."""

from __future__ import annotations

import httpx
import pytest
import torch

from blocktrain.cli.shared.block_source import DirectorySource, RunSource, next_look_s
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import build_block
from blocktrain.spec import Denoise
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.invite import Invite


def client_of(house) -> CoordinatorClient:
    """To a coordinator in this process."""

    def answer(request: httpx.Request) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name == "range"}
        reply = house.ask(request.method, request.url.path, headers=headers)
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)

    return CoordinatorClient(Invite("coordinator.test", 80, "x" * 20), transport=httpx.MockTransport(answer))


@pytest.fixture
def denoising(new_house):
    made = new_house(objective=Denoise())
    made.coordinator.loop.tick()  # its initial blocks are there
    return made


def test_stages_that_hold_different_blocks_agree_on_the_version(denoising, tmp_path):
    left, right = (
        RunSource(client_of(denoising), tmp_path / name).newest(blocks)
        for name, blocks in (("l", [0, 1]), ("r", [2, 3]))
    )
    assert left.info == right.info
    assert (left.blocks, right.blocks) == ((0, 1), (2, 3))
    assert len(list((tmp_path / "l").iterdir())) == 2


def test_a_newer_version_is_fetched_and_the_known_one_is_not(denoising, tmp_path):
    source = RunSource(client_of(denoising), tmp_path)
    first = source.newest([0])
    assert source.newest([0], first.info.version) is None
    denoising.member().work()
    newer = source.newest([0], first.info.version)
    assert newer.info.version != first.info.version


def test_blocks_that_do_not_exist_yet_are_waited_for(house, tmp_path):
    source = RunSource(client_of(house), tmp_path)
    with pytest.raises(CheckpointError, match="not exist yet"):
        source.newest([0])
    assert source.newest([0], "some version") is None


def test_a_block_that_the_run_does_not_have_is_refused(denoising, tmp_path):
    with pytest.raises(ConfigError, match="there is no block 9"):
        RunSource(client_of(denoising), tmp_path).newest([9])


def test_a_directory_is_read_again_when_its_manifest_changes(denoising, tmp_path):
    run = RunDirectory.create(tmp_path / "run", denoising.spec, "0" * 64)
    blocks = {k: build_block(denoising.spec, k).state_dict() for k in range(4)}
    run.finish_phase(0, blocks, 1)
    source = DirectorySource(tmp_path / "run")
    first = source.newest([1, 2])
    assert (first.blocks, source.num_blocks()) == ((1, 2), 4)
    assert source.newest([1, 2], first.info.version) is None
    run.save_block(0, {name: tensor + torch.ones(1) for name, tensor in blocks[0].items()}, 2)
    assert source.newest([1, 2], first.info.version).info.version != first.info.version


@pytest.mark.parametrize("now_s, wait_s", [(100.0, 10.0), (103.0, 7.0), (109.5, 0.5)])
def test_all_stages_look_at_the_same_moments(now_s, wait_s):
    assert next_look_s(now_s, 10.0) == wait_s
