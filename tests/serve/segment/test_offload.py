"""Segments over shared layers and over layers left on the disk: the same answers as the model in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blocktrain.io.checkpoint import RunDirectory, copy_as
from blocktrain.model.block import block_shapes
from blocktrain.model.stack import BlockModel
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.segment.segment import Segment
from blocktrain.serve.traversal import Draft, Noise, Traversal
from blocktrain.spec import Denoise, EndToEnd, RunSpec, preset

SHAPE = {"model.layers": [5, 2, 3, 2], "model.physical_layers": [2, 1, 2, 2]}
STACK = preset("tiny").with_(objective=EndToEnd(), **SHAPE)
DENOISE = preset("tiny").with_(objective=Denoise(span_share=0.5), **SHAPE)
PROMPT = b"We the people of the United States"


def saved(path: Path, spec: RunSpec) -> RunDirectory:
    run = RunDirectory.create(path, spec, corpus_sha256="c0")
    for index in range(spec.model.blocks):
        generator = torch.Generator().manual_seed(index)
        shapes = block_shapes(spec, index)
        run.save_block(index, {k: 0.2 * torch.randn(shape, generator=generator) for k, shape in shapes.items()}, 1)
    return run


def in_half(run: RunDirectory, path: Path) -> RunDirectory:
    return copy_as(run, path, torch.float16, lambda block: block_shapes(run.spec, block))


def chain(run: RunDirectory, *, offload: bool) -> LocalForward:
    return LocalForward(*(Segment.open(run.path, blocks, offload=offload) for blocks in ([0], [1, 2], [3])))


def the_truth(run: RunDirectory) -> BlockModel:
    blocks = range(run.spec.model.blocks)
    return BlockModel.from_tensors(run.spec, {k: run.load_block(k, block_shapes(run.spec, k)) for k in blocks})


@pytest.mark.parametrize("spec", [STACK, DENOISE], ids=["stack", "denoise"])
def test_an_offloaded_float32_model_answers_as_the_loaded_one_bit_for_bit(tmp_path, spec):
    run = saved(tmp_path, spec)
    asked = Traversal("s", PROMPT, read=5)
    loaded, offloaded = (chain(run, offload=offload).run(asked) for offload in (False, True))
    assert torch.equal(loaded.prompt_logits, offloaded.prompt_logits)


@pytest.mark.parametrize("candidates", [1, 3])
@pytest.mark.parametrize("spec", [STACK, DENOISE], ids=["stack", "denoise"])
def test_an_offloaded_model_drafts_the_bytes_of_the_loaded_one(tmp_path, spec, candidates):
    """The loaded one drafts with model/cpu_draft.py, the other with its layers' own steps."""
    run = saved(tmp_path, spec)
    asked = Traversal("s", PROMPT, draft=Draft(9, candidates, seed=3))
    loaded, offloaded = (chain(run, offload=offload).run(asked) for offload in (False, True))
    assert torch.equal(loaded.tails, offloaded.tails)
    torch.testing.assert_close(loaded.tail_logits, offloaded.tail_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", [STACK, DENOISE], ids=["stack", "denoise"])
def test_an_offloaded_half_precision_model_answers_as_the_truth_to_rounding(tmp_path, spec):
    run = in_half(saved(tmp_path / "full", spec), tmp_path / "half")
    answer = chain(run, offload=True).run(Traversal("s", PROMPT, read=5))
    wanted = the_truth(run).logits(torch.tensor([list(PROMPT)]))[0, -5:]
    torch.testing.assert_close(answer.prompt_logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("offload", [False, True])
def test_caches_hold_every_logical_layer(tmp_path, offload):
    """Byte after byte with cached context is what the whole text gives at once."""
    run = saved(tmp_path, STACK)
    forward = chain(run, offload=offload)
    rows = [
        forward.run(Traversal("s", PROMPT[:length], start=max(0, length - 1))).prompt_logits
        for length in range(1, len(PROMPT))
    ]
    wanted = the_truth(run).logits(torch.tensor([list(PROMPT[:-1])]))[0]
    torch.testing.assert_close(torch.cat(rows), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("offload", [False, True])
def test_a_sweep_through_shared_layers_writes_the_bytes_of_the_model_in_one_process(tmp_path, offload):
    run = saved(tmp_path, DENOISE)
    swept = chain(run, offload=offload).run(Traversal("s", PROMPT, noise=Noise(length=12, seed=3)))
    assert swept.written == the_truth(run).sweep(PROMPT, 12, torch.Generator().manual_seed(3))
