import numpy as np
import pytest

from blocktrain.data.corpus import Corpus
from blocktrain.model import noise
from blocktrain.spec import Denoise, preset
from blocktrain.train.partition import loss_profile, resolve_partition

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
CORPUS = Corpus(train=TEXT, valid=TEXT, test=TEXT, sha256="0" * 64)
ADAPTIVE = preset("tiny").with_(objective=Denoise(partition="adaptive"))


def test_more_noise_is_harder_to_see_through():
    sigmas, losses = loss_profile(ADAPTIVE, ADAPTIVE.objective, CORPUS)
    assert (sigmas[0], sigmas[-1]) == (1.0, 10.0)
    assert losses[-1] > losses[0]


def test_the_probe_fills_in_the_edges_once_and_for_all():
    resolved = resolve_partition(ADAPTIVE, CORPUS)
    assert len(resolved.objective.edges) == 5
    assert resolve_partition(resolved, CORPUS) == resolved
    assert noise.edges(4, resolved.objective) == list(resolved.objective.edges)


@pytest.mark.parametrize("spec", [preset("tiny"), preset("tiny").with_(objective=Denoise())])
def test_other_specs_are_left_as_they_are(spec):
    assert resolve_partition(spec, CORPUS) is spec
