"""Sweeps: one traversal for a whole output. Denoising equals BlockModel.sweep; drafting and weighing approaches the
model's distribution as candidates are added."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from blocktrain.errors import ConfigError
from blocktrain.serve.decode.decoder import decoder_of
from blocktrain.serve.decode.request import Mode, Request, check
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.segment.sampling import (
    divergence_bound,
    effective_candidates,
    log_likelihood,
    probabilities,
)
from blocktrain.serve.traversal import Draft, Traversal, Weigh

PROMPT = b"The president of "


def swept(forward, request):
    """(bytes, stats, prompts asked with)"""
    asking, written, prompts = decoder_of(request, forward.info, "s"), b"", []
    while (asked := asking.ask()) is not None:
        prompts.append(asked.prompt)
        written += bytes(byte.value for byte in asking.take(forward.run(asked), 0.1))
    return written, asking.stats, prompts


@pytest.fixture
def spans(model, segments):
    return LocalForward(*segments(model("spans"), [[0, 1], [2, 3]]))


def test_a_denoising_sweep_is_the_model_s_in_one_traversal(model, spans):
    written, stats, _ = swept(spans, Request(PROMPT, 16, Mode.SWEEP, seed=4))
    assert written == model("spans").sweep(PROMPT, 16, torch.Generator().manual_seed(4))
    assert (stats.traversals, stats.written) == (1, 16)


def test_more_than_was_trained_at_once_takes_more_sweeps(model, spans):
    """16 of 64 bytes were trained as spans: 40 bytes take three, each behind what was written before."""
    written, stats, _ = swept(spans, Request(PROMPT, 40, Mode.SWEEP, seed=4))
    first, second = written[:16], written[16:32]
    assert stats.traversals == 3
    assert len(written) == 40
    assert first == model("spans").sweep(PROMPT, 16, torch.Generator().manual_seed(4))
    assert second == model("spans").sweep(PROMPT + first, 16, torch.Generator().manual_seed(5))


@pytest.mark.parametrize("settings", [{"temperature": 0.5}, {"temperature": 0}, {"top_p": 0.9}])
def test_a_denoising_sweep_refuses_what_it_cannot_honour(spans, settings):
    with pytest.raises(ConfigError, match=r"has no temperature or top_p.*give candidates to draft and weigh"):
        check(Request(PROMPT, 8, Mode.SWEEP, **settings), spans.info)
    check(Request(PROMPT, 8, Mode.SWEEP, candidates=4, **settings), spans.info)


def test_a_sweep_weighs_all_that_follows_its_exact_beginning_in_one_traversal(local):
    written, stats, _ = swept(local, Request(PROMPT, 30, Mode.SWEEP, seed=1, candidates=5))
    exact, _, _ = swept(local, Request(PROMPT, stats.exact, Mode.SPECULATIVE, seed=1))
    assert (len(written), stats.traversals) == (30, 2)
    assert 1 <= stats.exact < 30
    assert written[: stats.exact] == exact
    assert 1 <= stats.effective_candidates <= 5


def test_a_sweep_whose_tree_holds_the_whole_output_is_exact(agreeing):
    request = Request(b"ab", 3, Mode.SWEEP, temperature=0, candidates=8)
    written, stats, _ = swept(agreeing, request)
    assert (stats.exact, stats.traversals) == (3, 1)
    assert written == swept(agreeing, Request(b"ab", 3, Mode.SPECULATIVE, temperature=0))[0]


def test_an_output_longer_than_the_window_takes_more_sweeps_and_keeps_half_of_it_in_sight(stacked):
    written, stats, prompts = swept(stacked, Request(PROMPT, 100, Mode.SWEEP, seed=1, candidates=1))
    text = PROMPT + written
    assert len(written) == 100
    assert prompts == [text[:17], text[32:64], text[53:96]]
    assert stats.traversals == 3


def test_draft_bytes_cuts_a_sweep_into_parts(stacked):
    assert swept(stacked, Request(PROMPT, 20, Mode.SWEEP, candidates=1, draft_tokens=5))[1].traversals == 4


def test_the_likeliest_candidate_wins_at_temperature_zero(model, stacked):
    request = Request(PROMPT, 12, Mode.SWEEP, temperature=0, candidates=6, seed=9)
    asking = decoder_of(request, stacked.info, "s")
    begun = PROMPT + bytes(byte.value for byte in asking.take(stacked.run(asking.ask()), 0.1))
    asked = asking.ask()
    written = [byte.value for byte in asking.take(stacked.run(asked), 0.1)]
    candidates = stacked.run(asked.with_(weigh=None)).tails

    def likelihood(tail):
        logits = model("stacked").logits(torch.tensor([[*begun, *tail]]))[0]
        return log_likelihood(logits[None, len(begun) - 1 : -1], torch.tensor([tail])).item()

    assert written == max(candidates.tolist(), key=likelihood)


def test_a_single_candidate_at_temperature_zero_is_the_drafter_s_greedy_text(stacked):
    texts = {swept(stacked, Request(PROMPT, 12, Mode.SWEEP, 0.0, candidates=1, seed=seed))[0] for seed in (1, 2)}
    assert len(texts) == 1


def distance(outputs, model, temperature):
    """Total variation between what came and what the model says: pairs of letters, and all others together."""
    gaps = []
    for letters in product(b"abc", repeat=2):
        places = probabilities(model.logits(torch.tensor([[*b"ab", *letters]]))[0], temperature)
        chance = math.prod(float(places[1 + at, letter]) for at, letter in enumerate(letters))
        share = sum(output == bytes(letters) for output in outputs) / len(outputs)
        gaps.append(share - chance)
    return (sum(map(abs, gaps)) + abs(sum(gaps))) / 2


def weighed_rows(parts, candidates, count=300):
    """What is chosen of two drafted bytes, and the bound on its divergence from the model, of many seeds."""
    batch = [
        Traversal(str(seed), b"ab", draft=Draft(2, candidates, seed, 0.8, offset=2), weigh=Weigh(0.8, seed, 2))
        for seed in range(count)
    ]
    for part in parts:
        batch = part.advance(batch)
    bounds = [divergence_bound(reply.log_weights.double()) for reply in batch]
    return [bytes(reply.tails[0].tolist()) for reply in batch], sum(bounds) / count


def test_the_distribution_and_its_bound_approach_the_model_s_as_candidates_are_added(letters, segments):
    (two, bound_two), (many, bound_many) = (weighed_rows(segments(letters, [[0], [1]]), n) for n in (2, 32))
    assert distance(two, letters, 0.8) > 0.2 > 0.12 > distance(many, letters, 0.8)
    assert bound_two > 3 * bound_many > 0


def test_the_exact_beginning_of_a_sweep_is_distributed_as_the_model(letters, segments, write):
    parts = segments(letters, [[0], [1]])
    requests = [Request(b"ab", 2, Mode.SWEEP, 0.8, seed=seed, candidates=5) for seed in range(300)]
    asking = [decoder_of(request, parts[0].info, str(request.seed)) for request in requests]
    assert distance(write(parts, asking), letters, 0.8) < 0.12


def test_effective_candidates_count_those_that_matter():
    assert effective_candidates(torch.full((8,), 1 / 8)) == pytest.approx(8)
    assert effective_candidates(torch.tensor([1.0, 0, 0])) == 1
