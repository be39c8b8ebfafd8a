import pytest
import torch

from blocktrain.model.block import Block
from blocktrain.model.continuation import Continuation
from blocktrain.model.stack import BlockModel, window_start
from blocktrain.spec import Denoise, preset

TINY = preset("tiny").with_(**{"model.context": 16})
SHAPES = {
    "stacked": TINY,
    "denoise": TINY.with_(objective=Denoise()),
    "shared layers": TINY.with_(**{"model.layers": 8, "model.physical_layers": 1}),
    "narrow tables": TINY.with_(**{"model.table_rank": 8}),
}


def filled(spec, combine=None):
    model = BlockModel(spec, combine).eval()
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def continuation_of(model, weights):
    return Continuation(model.spec.model, [x for x in model.blocks if isinstance(x, Block)], weights)


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["by numpy", "by torch"])
def test_a_text_that_grows_past_its_window_has_the_logits_of_the_whole_model(spec, dtype):
    weights = (0.5, 0.0, 0.25, 1.0)
    model = filled(spec, {"stack": weights, "mean": weights}).to(dtype)
    text = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    continuation = continuation_of(model, weights)
    for length in (5, *range(6, 41)):
        start = window_start(length, 16)
        found = continuation.logits(text[:length], start)
        expected = model.logits(torch.tensor([text[start:length]]))[0, -1]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_several_new_tokens_are_computed_at_once():
    model = filled(TINY)
    one, many = (continuation_of(model, (0, 0, 0, 1)) for _ in range(2))
    for length in range(1, 10):
        last = one.logits(b"A new text"[:length], 0)
    many.logits(b"A n", 0)
    torch.testing.assert_close(many.logits(b"A new tex", 0), last)
