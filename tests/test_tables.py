"""The width of the tables of embedding and read-out, chosen so that they do not eat the model."""

from __future__ import annotations

import pytest

from blocktrain.model.block import block_shapes, build_block, physical_parameters, table_parameters
from blocktrain.spec import Denoise, EndToEnd, RunSpec, Stacked, preset
from blocktrain.tables import LARGEST_SHARE, MULTIPLE, NARROWEST, with_vocabulary


def shape(width: int, **settings: object) -> RunSpec:
    return preset("wikitext").with_(**{"model.width": width, "model.heads": 4, **settings})


def share(spec: RunSpec) -> float:
    return table_parameters(spec) / physical_parameters(spec)


@pytest.mark.parametrize("width, vocabulary", [(256, 8192), (256, 4096), (512, 8192), (1024, 50_257)])
def test_the_tables_of_many_tokens_are_as_wide_as_a_third_of_the_parameters_allows(width, vocabulary):
    spec = with_vocabulary(shape(width), vocabulary)
    wider = spec.with_(**{"model.table_rank": spec.model.table_rank + MULTIPLE})
    assert share(spec) <= LARGEST_SHARE < share(wider)


def test_the_tables_of_bytes_and_of_few_tokens_are_as_wide_as_the_model():
    assert with_vocabulary(shape(256), 256) == shape(256)
    assert with_vocabulary(shape(256), 1024) == shape(256, **{"model.vocabulary": 1024})


def test_a_named_width_stays_and_the_models_own_needs_no_matrix_between():
    named = with_vocabulary(shape(128, **{"model.table_rank": 128}), 8192)
    assert named.model.table_rank == 128
    assert build_block(named, 0).state_dict().keys() == build_block(shape(128), 0).state_dict().keys()


@pytest.mark.parametrize("objective, reading", [(Stacked(), [0]), (EndToEnd(), [0]), (Denoise(), [0, 1, 2, 3])])
def test_with_narrow_tables_later_blocks_of_a_stack_have_no_embedding(objective, reading):
    spec = with_vocabulary(shape(256, objective=objective), 8192)
    shapes = [block_shapes(spec, block) for block in range(4)]
    assert [block for block, each in enumerate(shapes) if "embedding" in each] == reading
    assert share(spec) <= LARGEST_SHARE


def test_the_tables_of_a_small_model_stay_usable():
    assert with_vocabulary(preset("tiny"), 8192).model.table_rank == NARROWEST
