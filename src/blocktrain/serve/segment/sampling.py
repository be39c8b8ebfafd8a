"""Drawing bytes: distributions from logits, and random numbers that are a function of what they are for, so that the
same seed writes the same bytes however the work is cut. Pure. Next: work.py drafts with it, decode.py decides."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
DRAFT, ACCEPT, REPLACE, CHOOSE = range(4)  # what a random number is for: independent streams of one seed


def probabilities(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """[…, 256] in double: temperature 0 puts all on the likeliest byte, top_p keeps the likeliest of that mass."""
    if temperature == 0:
        return torch.zeros_like(logits, dtype=torch.double).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    shares = (logits.double() / temperature).softmax(-1)
    if top_p == 1:
        return shares
    ordered, order = shares.sort(-1, descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p)
    return torch.zeros_like(shares).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))


def pick(shares: Tensor, uniform: Tensor) -> Tensor:
    """The byte at which the cumulated shares [R, 256] pass each uniform number [R] of [0, 1)."""
    cumulated = shares.cumsum(-1)
    at = (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(-1)
    return at.clamp_max_(shares.size(-1) - 1)


def log_likelihood(logits: Tensor, tails: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """[M]: the sum over each candidate's bytes, from the logits before each of them [M, N, 256]."""
    if temperature and top_p == 1:
        scaled = logits if temperature == 1 else logits / temperature
        picked = scaled.gather(-1, tails[..., None].long())[..., 0]
        return (picked - scaled.logsumexp(-1)).double().sum(-1)
    return log_share(probabilities(logits, temperature, top_p), tails).sum(-1)


def log_share(shares: Tensor, picked: Tensor) -> Tensor:
    """[…]: of the byte that was picked from each distribution […, 256]; finite also where it has none."""
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
