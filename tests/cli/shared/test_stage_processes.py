"""How blocktrain serve splits the blocks of a model among stages."""

from __future__ import annotations

import pytest

from blocktrain.cli.shared.stage_processes import split_blocks
from blocktrain.errors import ConfigError


@pytest.mark.parametrize("blocks, stages", [(4, 1), (4, 3), (7, 3), (5, 5)])
def test_blocks_are_shared_evenly_and_in_order(blocks, stages):
    shares = split_blocks(blocks, stages)
    assert [block for share in shares for block in share] == list(range(blocks))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_first_stage_which_drafts_gets_the_block_that_is_left_over():
    assert split_blocks(4, 3) == [range(2), range(2, 3), range(3, 4)]


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ConfigError, match="give 1 to 4"):
        split_blocks(4, 5)
