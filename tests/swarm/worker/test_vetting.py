"""Scoring on a worker: what it measures is the loss of the weights that the updates lead to."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.spec import Stacked, preset
from blocktrain.swarm.worker.vetting import Scoring, finite
from blocktrain.train.trainer import BlockTrainer
from blocktrain.wire.codecs.table import update_codec
from blocktrain.wire.messages import MAX_LOSS, Blob, BlockVersion, VetLease, VetUpdate
from blocktrain.wire.safetensors import by_block, encode, flat
from blocktrain.wire.updates import encode_update

SPEC = preset("tiny").with_(objective=Stacked())
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
DRAW, BATCHES = 7, 2


class Blobs:
    """A client that has every blob."""

    def __init__(self):
        self.kept = {}

    def keep(self, data: bytes) -> Blob:
        blob = Blob(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
        self.kept[blob.sha256] = data
        return blob

    def download(self, blob, cache):
        return memoryview(self.kept[blob.sha256])


@pytest.mark.parametrize("codec", ["fp32", "int8", "vector"])
def test_every_score_is_the_loss_of_the_weights_that_the_updates_lead_to(codec, tmp_path):
    trainer, blobs = BlockTrainer(SPEC, SPEC.phases[0], TEXT, {}, compile=False), Blobs()
    blocks = {block: as_arrays(tensors) for block, tensors in trainer.weights().items()}
    base, draw = flat(blocks), np.random.default_rng(0)
    earlier = {name: x + np.float32(1e-3) for name, x in base.items()}
    versions = tuple(BlockVersion(block=k, version=1, tensors=blobs.keep(encode(x))) for k, x in blocks.items())
    before = [(k, blobs.keep(encode(x))) for k, x in by_block(earlier).items()]
    older = tuple(BlockVersion(block=k, version=0, tensors=blob) for k, blob in before)
    steps = [
        {name: draw.normal(0, size, x.shape).astype(np.float32) for name, x in base.items()} for size in (0.02, 0.2)
    ]
    made = update_codec(SPEC.with_(**{"swarm.update": codec}).swarm, phase_steps=100, steps_done=10)
    sent = [encode_update(base, {n: base[n] - s[n] for n in base}, made, earlier) for s in steps]
    updates = tuple(VetUpdate(payload=blobs.keep(x), share=0.5, base=versions, earlier=older) for x in sent)
    lease = VetLease(
        lease="vet-1-a",
        time_left_s=1,
        phase=0,
        draw=DRAW,
        batches=BATCHES,
        trained=versions,
        below=(),
        ahead=(),
        updates=updates,
    )
    shapes = {k: {name: x.shape for name, x in tensors.items()} for k, tensors in blocks.items()}
    found = Scoring(blobs, tmp_path, shapes.__getitem__, trainer).scores(lease, base, TEXT)

    def loss_of(weights):
        trainer.adopt({k: as_tensors(x) for k, x in by_block(weights).items()})
        return trainer.held_out_loss(TEXT, DRAW, BATCHES)

    assert found.base == loss_of(base)
    assert found.alone[0] < found.alone[1], "the longer random step hurts more"
    if codec == "fp32":
        alone = [loss_of({n: base[n] - s[n] for n in base}) for s in steps]
        assert found.alone == pytest.approx(alone, abs=1e-5)
        half = loss_of({n: base[n] - 0.5 * steps[1][n] for n in base})
        assert found.without[0] == pytest.approx(half, abs=1e-5)


@pytest.mark.parametrize(
    "loss, told", [(2.5, 2.5), (float("nan"), MAX_LOSS), (float("inf"), MAX_LOSS), (1e9, MAX_LOSS)]
)
def test_the_loss_of_a_diverged_block_is_the_largest(loss, told):
    assert finite(loss) == told
