"""Tables: how wide the embedding and the read-out of a block are, and which blocks have an embedding. For bytes every
block has both, as wide as the model. With thousands of tokens such tables would be most of the model, so a run with a
tokenizer has narrower ones. No torch.
Next: model/block.py, which builds them; data/corpus.py, which learns the vocabulary from a run's text."""

from __future__ import annotations

from blocktrain.settings import Denoise, ModelSpec
from blocktrain.spec import RunSpec

LARGEST_SHARE = 1 / 3  # of the parameters
NARROWEST = 24  # a small model with many tokens has larger shares rather than narrower tables
MULTIPLE = 8  # ranks are multiples of it, for fast products


def narrow_rank(model: ModelSpec) -> int | None:
    """The width of the tables if it is not the model's. A small matrix is then between each table and the stream."""
    return None if model.table_rank == model.width else model.table_rank


def reads_tokens(spec: RunSpec, block: int) -> bool:
    """Whether a block has an embedding. With narrow tables only the first one has, and the others read the state alone:
    the parameters make all tables wider instead. The blocks of `denoise` have no common state, so each reads."""
    return block == 0 or narrow_rank(spec.model) is None or isinstance(spec.objective, Denoise)


def with_vocabulary(spec: RunSpec, size: int) -> RunSpec:
    """The spec for so many tokens. The width of the tables is chosen, unless the spec names one."""
    sized = spec.with_(**{"model.vocabulary": size})
    return sized if sized.model.table_rank else sized.with_(**{"model.table_rank": chosen_rank(sized)})


def chosen_rank(spec: RunSpec) -> int | None:
    """The widest tables that are at most a third of the parameters. None: as wide as the model."""
    model = spec.model
    layers = 12 * model.width**2 * sum(model.physical_layers_of(block) for block in range(model.blocks))
    most = layers * LARGEST_SHARE / (1 - LARGEST_SHARE)
    if 2 * model.blocks * model.vocabulary * model.width <= most:
        return None
    embeddings = model.blocks if isinstance(spec.objective, Denoise) else 1
    rank = int(most / ((model.blocks + embeddings) * (model.vocabulary + model.width)))
    rank = max(NARROWEST, rank - rank % MULTIPLE)
    return rank if rank < model.width else None
