"""The inner products of a round's updates, which tell all of their norms, distances and angles. Pure. They are computed
in passes over pieces of a few updates at a time, so that memory does not grow with the number of updates.
Next: screened.py, centered.py and krum.py, which need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from blocktrain.swarm.policy.averaging.base import WeightedUpdate
from blocktrain.wire.safetensors import Floats

GROUP = 32  # updates of which one piece each is in memory, twice
ONE_THREAD = 2**18  # multiplications up to which OpenBLAS uses one thread


def inner_products(parts: Sequence[WeightedUpdate], sizes: Mapping[str, int]) -> Floats:
    """⟨sΔ, sΔ'⟩ of all pairs, in float64. Sums of products depend on the machine in their last digits: what a rule
    decides by them is recorded, so that a version can be merged again bit for bit."""
    products = np.zeros((len(parts), len(parts)))
    groups = [range(start, min(start + GROUP, len(parts))) for start in range(0, len(parts), GROUP)]
    for number, rows in enumerate(groups):
        for columns in groups[number:]:
            block = products[rows.start : rows.stop, columns.start : columns.stop]
            pairs = zip(_pieces(parts, rows, sizes), _pieces(parts, columns, sizes), strict=True)
            for one, other in pairs if rows != columns else ((x, x) for x in _pieces(parts, rows, sizes)):
                block += _products(one, other)
    upper = np.triu(products)
    scales = np.array([part.scale for part in parts])
    return np.asarray((upper + np.triu(upper, 1).T) * np.outer(scales, scales))


def _products(one: Floats, other: Floats) -> Floats:
    """One matrix product after the other, each so small that BLAS starts no threads for it."""
    products, columns = np.zeros((len(one), len(other))), max(1, ONE_THREAD // (len(one) * len(other)))
    for start in range(0, one.shape[1], columns):
        here = slice(start, start + columns)
        products += one[:, here] @ other[:, here].T
    return products


def _pieces(parts: Sequence[WeightedUpdate], which: range, sizes: Mapping[str, int]) -> Iterator[Floats]:
    """[updates, elements], piece after piece."""
    opened = [parts[index].open() for index in which]
    for name in sizes:
        for pieces in zip(*(deltas(name) for deltas in opened), strict=True):
            yield np.stack(pieces, dtype=np.float64)


def distances(products: Floats, centre: Floats) -> Floats:
    """From each update to the sum of all updates with these factors."""
    squared = np.diag(products) - 2 * products @ centre + centre @ products @ centre
    return np.asarray(np.sqrt(np.maximum(squared, 0.0)))
