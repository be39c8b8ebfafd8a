"""Weighing: one of several drafted rows, drawn by its weight p / q: sampling importance resampling (Rubin 1987). Pure.
Next: segment.py has the last segment choose, so that only what was chosen travels back; sweep.py asks for it."""

from __future__ import annotations

import torch
from torch import Tensor

from blocktrain.serve.segment.sampling import CHOOSE, log_likelihood, pick, uniforms
from blocktrain.serve.traversal import Traversal, Weigh


def weighed(t: Traversal, weigh: Weigh) -> Traversal:
    """The traversal with the chosen row alone. `t` has passed all blocks."""
    assert t.tails is not None
    assert t.tail_logits is not None
    shares = shares_of(t, weigh.temperature)
    chosen = int(pick(shares[None], uniforms(weigh.seed, CHOOSE, 1, weigh.offset, 1)[0]))
    own = slice(chosen, chosen + 1)
    return t.with_(
        weigh=None,
        tails=t.tails[own],
        tail_state=None if t.tail_state is None else t.tail_state[own],
        tail_logits=t.tail_logits[own],
        draft_log_likelihood=None,
        shares=shares.float(),
    )


def shares_of(t: Traversal, temperature: float) -> Tensor:
    """Each row's chance to be chosen, [M]; at temperature 0 all on the one that the model finds likeliest."""
    assert t.tails is not None
    assert t.draft_log_likelihood is not None
    tails, logits = t.tails.cpu(), before_each(t.prompt_logits, t.tail_logits)
    if temperature == 0:
        scores = log_likelihood(logits, tails)
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    return (log_likelihood(logits, tails, temperature) - t.draft_log_likelihood.cpu()).softmax(-1)


def effective_candidates(shares: Tensor) -> float:
    """1 / Σ share²: M where all count the same, 1 where one takes all."""
    return float(1 / shares.square().sum())


def before_each(prompt_logits: Tensor | None, tail_logits: Tensor | None) -> Tensor:
    """[M, N, 256]: what was said before each byte of each row was seen."""
    assert prompt_logits is not None
    assert tail_logits is not None
    rows, _, symbols = tail_logits.shape
    first = prompt_logits.view(-1, symbols)[-1].expand(rows, 1, symbols)
    return torch.cat([first, tail_logits[:, :-1]], 1).cpu().float()
