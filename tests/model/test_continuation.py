import pytest
import torch

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


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["by numpy", "by torch"])
def test_a_text_that_grows_past_its_window_has_the_logits_of_the_whole_model(spec, dtype):
    weights = (0.5, 0.0, 0.25, 1.0)
    model = filled(spec, {"stack": weights, "mean": weights}).to(dtype)
    text = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    continuation = model.continuation()
    for length in (5, *range(6, 41)):
        start = window_start(length, 16)
        found = continuation.logits(text[:length], start)
        expected = model.logits(torch.tensor([text[start:length]]))[0, -1]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_text_that_goes_another_way_is_computed_from_there_on():
    model = filled(TINY)
    continuation = model.continuation()
    for text in (b"A new text", b"A new", b"A new", b"A newer one", b"Another"):
        found, alone = continuation.logits(text, 0), model.continuation().logits(text, 0)
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)
