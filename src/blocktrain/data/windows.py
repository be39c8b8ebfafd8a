"""Windows: which tokens a training step reads, and those of an evaluation. A pure function of the seed, block, shard
and step. Next: shards.py, tokens that are left in their files; train/trainer.py, which trains on the windows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blocktrain.data.shards import TokenShards
from blocktrain.errors import ConfigError, CorpusError
from blocktrain.spec import NUM_SYMBOLS, RunSpec

Bytes: TypeAlias = NDArray[np.uint8]
Tokens: TypeAlias = Bytes | TokenShards  # a split: bytes in memory, or the shards of a prepared corpus
Window: TypeAlias = NDArray[Any]  # of uint8 or int32


class ShardSizes(Protocol):
    """What must be known of a split to say which of its files a step reads."""

    @property
    def sizes(self) -> Sequence[int]:
        """The tokens of each file."""
        ...


SHARDS_AT_ONCE = 2  # files that the windows of a step come from
STEPS_PER_SHARDS = 64  # steps before other files are chosen


def windows(data: Tokens, *, count: int, length: int, seed: int, block: int, shard: int, step: int) -> Window:
    """[count, length] tokens from random starts. Equal arguments give equal windows on every machine and NumPy version.

    The starts come from Philox's raw 64-bit words: NumPy guarantees their stream, but not that of `integers`. The
    modulo favours no start by more than one part in 2^64 / len(data)."""
    words = np.random.Philox(key=_key("windows", seed, block, shard, step) >> 128).random_raw(count)
    if isinstance(data, TokenShards):
        chosen = shards_of_step(data, length, seed, block, shard, step)
        return data.rows(_starts_in_shards(data, words, length, chosen), length)
    starts = (words % np.uint64(_num_starts(data, length))).astype(np.int64)
    return data.take(starts[:, None] + np.arange(length))


def shards_of_step(data: ShardSizes, length: int, seed: int, block: int, shard: int, step: int) -> tuple[int, ...]:
    """The files that the windows of a step come from. They stay the same for STEPS_PER_SHARDS steps, so that a machine
    needs few files at a time."""
    usable = _num_usable(data.sizes, length)
    if usable <= SHARDS_AT_ONCE:
        return tuple(range(usable))
    return _two_of(usable, seed, block, shard, step // STEPS_PER_SHARDS)


def _num_usable(sizes: Sequence[int], length: int) -> int:
    """The files that hold a window. All have the same size but the last, which may be too small."""
    usable = len(sizes) - (len(sizes) > 0 and sizes[-1] < length)
    if usable and sizes[0] >= length:
        return usable
    if (total := sum(sizes)) < length:
        raise CorpusError(f"a window of {length} tokens does not fit into {total}: give more text")
    raise CorpusError(f"a window of {length} tokens fits into no shard of the corpus: give more text")


@lru_cache(maxsize=64)
def _two_of(usable: int, seed: int, block: int, shard: int, turn: int) -> tuple[int, int]:
    key = _key("shards", seed, block, shard, turn) >> 128
    first, distance = (int(word) for word in np.random.Philox(key=key).random_raw(2))
    first %= usable
    return first, (first + 1 + distance % (usable - 1)) % usable


def shards_of_steps(data: ShardSizes, length: int, seed: int, block: int, shard: int, steps: range) -> dict[int, None]:
    """The files that some steps need, in the order of their first use."""
    firsts = sorted({*steps[:1], *(step for step in steps if step % STEPS_PER_SHARDS == 0)})
    chosen = (shards_of_step(data, length, seed, block, shard, step) for step in firsts)
    return dict.fromkeys(number for each in chosen for number in each)


def _starts_in_shards(
    data: TokenShards, words: NDArray[np.uint64], length: int, chosen: tuple[int, ...]
) -> NDArray[np.int64]:
    """Starts of windows that stay within one file each."""
    counts = np.array([data.sizes[index] - length + 1 for index in chosen], dtype=np.int64)
    ends = np.cumsum(counts)
    drawn = (words % np.uint64(ends[-1])).astype(np.int64)
    which = np.searchsorted(ends, drawn, side="right")
    begins = np.array(chosen, dtype=np.int64) * data.shard_tokens
    return begins[which] + drawn - (ends - counts)[which]


def num_consecutive_windows(data: Tokens, length: int) -> int:
    return len(range(0, _num_starts(data, length), length - 1))


def consecutive_windows(data: Tokens, length: int, first: int = 0, most: int | None = None) -> Window:
    """[n, length] tokens: the windows from number `first` on, `most` of them. Windows overlap by one token, so that
    each token after the first is predicted exactly once.

    The last tokens that do not fill a window (at most length - 2) are dropped."""
    assert length >= 2, f"a window of {length} tokens predicts nothing"
    chosen = range(0, _num_starts(data, length), length - 1)[first : None if most is None else first + most]
    starts = np.arange(chosen.start, chosen.stop, chosen.step)
    return data.take(starts[:, None] + np.arange(length))


def text_bytes(data: Tokens, tokens: NDArray[Any]) -> NDArray[np.int64]:
    """The bytes of text of each token."""
    if isinstance(data, TokenShards):
        return data.token_lengths.take(tokens)
    return np.ones(tokens.shape, dtype=np.int64)


def require_vocabulary(spec: RunSpec, data: Tokens) -> None:
    """Raw bytes fit every model with at least 256 tokens: `blocktrain doctor` measures a machine's speed with them."""
    prepared = isinstance(data, TokenShards)
    found = data.vocabulary if isinstance(data, TokenShards) else NUM_SYMBOLS
    if found > spec.model.vocabulary or (prepared and found != spec.model.vocabulary):
        raise ConfigError(
            f"the tokens of this corpus have a vocabulary of {found}, which does not fit the model: "
            f"model.vocabulary is {spec.model.vocabulary}: take the corpus that the model was trained on"
        )


def step_seed(seed: int, block: int, shard: int, step: int, purpose: str = "") -> int:
    """63 bits that seed the noise or dropout of this step. Independent of the windows and of other purposes."""
    return _key(f"step:{purpose}", seed, block, shard, step) >> (256 - 63)


def _key(purpose: str, *coordinates: int) -> int:
    """256 bits that differ when any coordinate differs. A hash, because adding or joining seeds can give equal keys."""
    return int.from_bytes(hashlib.sha256(repr((purpose, *map(int, coordinates))).encode()).digest(), "big")


def _num_starts(data: Tokens, length: int) -> int:
    if len(data) < length:
        unit = "tokens" if isinstance(data, TokenShards) else "bytes"
        raise CorpusError(f"a window of {length} {unit} does not fit into {len(data)}: give more text")
    return len(data) - length + 1
