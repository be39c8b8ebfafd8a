"""Tables: how wide the embedding and the read-out of each block are. For bytes they are as wide as the model. With
thousands of tokens such tables would be most of the model, so a run with a tokenizer has narrower ones. No torch.
Next: model/block.py, which builds them; data/corpus.py, which learns the vocabulary from a run's text."""

from __future__ import annotations

from blocktrain.settings import ModelSpec
from blocktrain.spec import RunSpec

LARGEST_SHARE = 1 / 3  # of the parameters
NARROWEST = 16  # a small model with many tokens has larger shares rather than narrower tables
MULTIPLE = 8  # ranks are multiples of it, for fast products


def narrow_rank(model: ModelSpec) -> int | None:
    """The width of the tables if it is not the model's. A small matrix is then between each table and the stream."""
    return None if model.table_rank == model.width else model.table_rank


def with_vocabulary(spec: RunSpec, size: int) -> RunSpec:
    """The spec for so many tokens. The width of the tables is chosen, unless the spec names one."""
    sized = spec.with_(**{"model.vocabulary": size})
    return sized if sized.model.table_rank else sized.with_(**{"model.table_rank": chosen_rank(sized.model)})


def chosen_rank(model: ModelSpec) -> int | None:
    """The widest tables that are at most a third of the parameters. None: as wide as the model."""
    layers = 12 * model.width**2 * sum(model.physical_layers_of(block) for block in range(model.blocks))
    most = layers * LARGEST_SHARE / (1 - LARGEST_SHARE)
    tables = 2 * model.blocks
    if tables * model.vocabulary * model.width <= most:
        return None
    rank = int(most / (tables * (model.vocabulary + model.width)))
    rank = max(NARROWEST, rank - rank % MULTIPLE)
    return rank if rank < model.width else None
