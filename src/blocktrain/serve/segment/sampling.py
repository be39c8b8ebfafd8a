"""Sampling: distributions from logits, random numbers, and the choice among drafted rows. Each random number is a
function of its seed, purpose and position, so the same seed writes the same tokens however the computation is cut.
Pure. V is the size of the vocabulary. Next: drafting.py draws drafts with it; decode/decoder.py accepts or replaces
them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blocktrain.serve.traversal import Traversal, Weigh

Words = npt.NDArray[np.uint64]
DRAFT, ACCEPT, REPLACE, CHOOSE = range(4)  # purposes of random numbers: independent streams of one seed


def probabilities(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """[…, V] in double. Temperature 0 puts all on the most likely token; top_p keeps the most likely tokens with that
    total probability."""
    if temperature == 0:
        return torch.zeros_like(logits, dtype=torch.double).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    shares = (logits.double() / temperature).softmax(-1)
    if top_p == 1:
        return shares
    ordered, order = shares.sort(-1, descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p)
    return torch.zeros_like(shares).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))


def pick(shares: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulated shares [R, V] exceed each uniform number [R] of [0, 1)."""
    cumulated = shares.cumsum(-1)
    at = (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(-1)
    return at.clamp_max_(shares.size(-1) - 1)


def log_likelihood(logits: Tensor, tails: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """[M]: the sum over each candidate's tokens, from the logits before each token [M, N, V]."""
    if temperature and top_p == 1:
        scaled = logits if temperature == 1 else logits / temperature
        picked = scaled.gather(-1, tails[..., None].long())[..., 0]
        return (picked - scaled.logsumexp(-1)).double().sum(-1)
    return log_share(probabilities(logits, temperature, top_p), tails).sum(-1)


def log_share(shares: Tensor, picked: Tensor) -> Tensor:
    """[…]: log-probability of the token picked from each distribution […, V]; finite even for probability 0."""
    return log_of(share_of(shares, picked))


def share_of(shares: Tensor, picked: Tensor) -> Tensor:
    return shares.gather(-1, picked[..., None].long())[..., 0]


def log_of(shares: Tensor) -> Tensor:
    return shares.clamp_min(torch.finfo(shares.dtype).tiny).log()


def uniforms(seed: int, stream: int, rows: int, first: int, count: int) -> Tensor:
    """[rows, count] numbers of [0, 1), double: each a function of (seed, stream, row, position) alone."""
    row, position = np.arange(rows, dtype=np.uint64)[:, None], np.arange(first, first + count, dtype=np.uint64)[None, :]
    key = mix(np.asarray(seed % 2**64, dtype=np.uint64), np.asarray(stream, dtype=np.uint64))
    return torch.from_numpy((mix(mix(key, row), position) >> np.uint64(11)) * 2.0**-53)


def mix(state: Words, value: Words) -> Words:
    """splitmix64 (Steele et al. 2014) of the state and one more number."""
    with np.errstate(over="ignore"):
        x: Words = np.asarray(state + (value + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Words = x ^ (x >> np.uint64(31))
        return mixed


def weighed(t: Traversal, weigh: Weigh) -> Traversal:
    """The traversal with one row, drawn by its weight p / q: sampling importance resampling (Rubin 1987). `t` has
    passed all blocks."""
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
    """The probability of each row to be chosen, [M]. Temperature 0 chooses the row that the model finds most likely."""
    assert t.tails is not None
    assert t.draft_log_likelihood is not None
    tails, logits = t.tails.cpu(), before_each(t.prompt_logits, t.tail_logits)
    if temperature == 0:
        scores = log_likelihood(logits, tails)
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    return (log_likelihood(logits, tails, temperature) - t.draft_log_likelihood.cpu()).softmax(-1)


def effective_candidates(shares: Tensor) -> float:
    """1 / Σ share²: M if all rows have equal shares, 1 if one row has all."""
    return float(1 / shares.square().sum())


def before_each(prompt_logits: Tensor | None, tail_logits: Tensor | None) -> Tensor:
    """[M, N, V]: the logits for each token of each row, from the positions before it."""
    assert prompt_logits is not None
    assert tail_logits is not None
    rows, _, symbols = tail_logits.shape
    first = prompt_logits.view(-1, symbols)[-1].expand(rows, 1, symbols)
    return torch.cat([first, tail_logits[:, :-1]], 1).cpu().float()
