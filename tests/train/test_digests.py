"""Training gives the same weights as before: the numbers below were computed by commit 1679a5b. No refactoring may
change them. A change that is meant to give other weights updates them.

Other processors round the last bits differently, so the weights themselves are not compared. Per block, the test
compares the norm of all weights and their product with a wave, which changes when any weight or the order changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktrain.data.corpus import Corpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes
from blocktrain.spec import Denoise, EndToEnd, Stacked, preset
from blocktrain.train.run import train_run

TEXT = b"".join(b"Line %d of the text: %d sheep, %d goats.\n" % (n, n * n % 97, n * n * n % 89) for n in range(400))
DATA = np.frombuffer(TEXT, dtype=np.uint8)
CORPUS = Corpus(DATA[:12_000], DATA[12_000:13_000], DATA[13_000:], sha256="0" * 64)
STEPS = 6

FINGERPRINTS = {
    "stacked": [(90.514, 11.507), (91.071, 40.677), (91.726, -94.711), (91.428, -119.049)],
    "dropout": [(90.512, 11.504), (91.045, 40.445), (91.712, -94.697), (91.421, -118.763)],
    "simultaneous": [(90.513, 11.389), (91.058, 40.545), (91.738, -94.046), (91.449, -119.21)],
    "denoise": [(90.426, 28.34), (91.147, 69.24), (91.829, -98.86), (91.54, -115.598)],
    "spans": [(90.421, 29.027), (91.137, 69.77), (91.822, -98.762), (91.533, -115.533)],
    "end_to_end": [(90.507, 11.41), (91.053, 40.629), (91.735, -94.169), (91.45, -119.188)],
}  # fmt: skip
OBJECTIVES = {
    "stacked": Stacked(),
    "dropout": Stacked(state_dropout=0.2),
    "simultaneous": Stacked(schedule="simultaneous", scaffold=0, lookahead=1, refresh_steps=2),
    "denoise": Denoise(),
    "spans": Denoise(span_share=0.25),
    "end_to_end": EndToEnd(),
}


def fingerprint(tensors: dict[str, torch.Tensor]) -> tuple[float, float]:
    weights = torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])
    wave = torch.cos(0.1 * torch.arange(len(weights), dtype=torch.float64))
    return weights.norm().item(), (weights @ wave).item()


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_training_still_gives_the_same_weights(tmp_path, name):
    spec = preset("tiny").with_(objective=OBJECTIVES[name], **{"train.steps": STEPS})
    run = RunDirectory.create(tmp_path / "run", spec, CORPUS.sha256)
    assert train_run(run, CORPUS)
    for block, expected in enumerate(FINGERPRINTS[name]):
        assert fingerprint(run.load_block(block, block_shapes(spec, block))) == pytest.approx(expected, abs=5e-3)
