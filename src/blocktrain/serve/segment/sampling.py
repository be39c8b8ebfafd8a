"""Sampling: distributions from logits, random numbers, and the choice among drafted rows. Each random number is a
function of its seed, purpose and position, so the same seed writes the same tokens however the computation is cut.
Pure. V is the size of the vocabulary. Next: drafting.py draws drafts with it; decode/decoder.py accepts or replaces
them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blocktrain.model.kv_cache import token_ids
from blocktrain.serve.traversal import Traversal, Verify, Weigh

Words = npt.NDArray[np.uint64]
NEVER = 1e4  # a difference of log-weights that no choice overcomes
DRAFT, NOISE, CHOOSE = 0, 1, 3  # purposes of random numbers: independent streams of one seed


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


def gumbels(seed: int, first: int, count: int, vocabulary: int) -> Tensor:
    """[count, V], double: Gumbel noise of each token at each position. The token with the largest logits / temperature
    + noise is distributed as their softmax. All who know the seed draw the same token from the same logits, and mostly
    the same from nearly the same logits (Gumbel coupling, Daliri et al. 2024)."""
    return -(-uniforms(seed, NOISE, vocabulary, first, count).T.log()).log()


def perturbed(logits: Tensor, noise: Tensor, temperature: float, top_p: float) -> Tensor:
    """[…, V], double: the token with the largest value is the one that is drawn. Temperature 0 adds no noise."""
    values = logits.double() + temperature * noise if temperature else logits.double()
    return values if top_p == 1 else values.masked_fill(probabilities(logits, temperature, top_p) == 0, -torch.inf)


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
    log_weights = log_weights_of(t, weigh.temperature)
    chosen = int(pick(log_weights.softmax(-1)[None], uniforms(weigh.seed, CHOOSE, 1, weigh.offset, 1)[0]))
    own = slice(chosen, chosen + 1)
    return t.with_(
        weigh=None,
        tails=t.tails[own],
        tail_state=None if t.tail_state is None else t.tail_state[own],
        tail_logits=t.tail_logits[own],
        draft_log_likelihood=None,
        log_weights=log_weights.float(),
    )


def verified(t: Traversal, verify: Verify) -> Traversal:
    """The traversal with what the whole model draws: the longest path of the drafted tree that it draws too, and one
    token more. `t` has passed all blocks. Each token is drawn from the whole model's logits, whatever was drafted."""
    assert t.prompt_logits is not None
    logits, row, path, written = t.prompt_logits[-1].cpu(), 0, [], []
    columns = 0 if t.tails is None else t.tails.size(1)
    noise = gumbels(verify.seed, verify.offset, columns + 1, logits.size(-1))
    for column in range(columns + 1):
        written.append(int(perturbed(logits, noise[column], verify.temperature, verify.top_p).argmax()))
        if column == columns or t.tails is None or t.parents is None or t.tail_logits is None:
            break
        follows = t.tails[:, column] == written[-1]
        if column:
            follows = follows & (t.parents[:, column] == row)
        if not follows.any():
            break
        row = int(follows.long().argmax())
        path.append(row)
        logits = t.tail_logits[row, column].cpu()
    kept = range(len(path))
    return t.with_(
        verify=None,
        parents=None,
        tail_state=None,
        tails=t.tails[path, kept][None] if path and t.tails is not None else None,
        tail_logits=t.tail_logits[path, kept][None] if path and t.tail_logits is not None else None,
        written=token_ids(written, logits.size(-1)),
    )


def log_weights_of(t: Traversal, temperature: float) -> Tensor:
    """log p / q of each row, [M]; their softmax is the probability of each to be chosen. Temperature 0 chooses the row
    that the model finds most likely: the others weigh next to nothing."""
    assert t.tails is not None
    assert t.draft_log_likelihood is not None
    tails, logits = t.tails.cpu(), before_each(t.prompt_logits, t.tail_logits)
    if temperature == 0:
        scores = log_likelihood(logits, tails)
        return (torch.nn.functional.one_hot(scores.argmax(), len(scores)).double() - 1) * NEVER
    return log_likelihood(logits, tails, temperature) - t.draft_log_likelihood.cpu()


def divergence_bound(log_weights: Tensor) -> float:
    """-log of the mean weight of the M rows. Its mean over outputs bounds the Kullback-Leibler divergence of the chosen
    row's distribution from the whole model's (Domke and Sheldon 2018): both p and q are normalised. A single value may
    be negative."""
    return float(math.log(len(log_weights)) - log_weights.logsumexp(-1))


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
