"""What may be asked of a decoder."""

from __future__ import annotations

import pytest

from blocktrain.errors import ConfigError
from blocktrain.serve.decode.request import MAX_CANDIDATES, Mode, Request, check
from blocktrain.serve.traversal import Draft, ModelInfo


def info(context: int) -> ModelInfo:
    return ModelInfo("m", "v", "stacked", 4, context, 0, False)


@pytest.mark.parametrize(
    "context, prompt, max_tokens, candidates, most",
    [(4096, 100, 4000, 256, 16), (4096, 1, 255, 256, None), (256, 100, 4000, 256, None), (10**6, 1, 10**6, 2, 1)],
)
def test_candidates_that_would_take_the_memory_of_the_stages_are_refused(context, prompt, max_tokens, candidates, most):
    request = Request(b"a" * prompt, max_tokens, Mode.SWEEP, candidates=candidates)
    if most is None:
        check(request, info(context))
    else:
        with pytest.raises(ConfigError, match=f"too many for the memory of the stages: give at most {most},"):
            check(request, info(context))


def test_a_stage_accepts_as_many_candidates_as_a_request_may_ask_for():
    assert Draft.__annotations__["candidates"].endswith(f"le={MAX_CANDIDATES})]")
