"""The named presets: complete settings of a run, from a test of seconds to the shape of the paper.
Next: settings.py, what each setting means and its default."""

from __future__ import annotations

from blocktrain.spec import CorpusSpec, ModelSpec, OptimSpec, RunSpec, TrainSpec

PRESETS: dict[str, RunSpec] = {
    "tiny": RunSpec(
        name="tiny",
        model=ModelSpec(width=32, heads=2, context=64, blocks=4, layers=4),
        train=TrainSpec(steps=30, windows=8),
        optim=OptimSpec(warmup_steps=5),
    ),
    "small": RunSpec(
        name="small",
        model=ModelSpec(width=64, heads=2, context=128, blocks=4, layers=4),
        train=TrainSpec(steps=400, windows=32),
    ),
    "wikitext": RunSpec(
        name="wikitext", corpus=CorpusSpec(source="wikitext-2"), train=TrainSpec(steps=473, windows=32)
    ),
    "paper": RunSpec(
        name="paper",
        model=ModelSpec(width=768, heads=12, context=1024, blocks=4, layers=16),
        train=TrainSpec(steps=25_000, windows=64),
        optim=OptimSpec(warmup_steps=200),
    ),
}
