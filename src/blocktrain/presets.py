"""The named presets: complete settings of a run, from a test of seconds to the shape of the paper. A preset with a size
for a name has about so many parameters and reads about 20 tokens per parameter. With so much text, blocks that are
trained through the loss of the whole model are better than blocks that are trained one after the other
(docs/method.md, "When blocks pay, and when they do not"). `tiny`, `small` and `wikitext` read less. Presets for a
user's own text have a BPE, which is better at equal work (docs/results.md, "Tokenizers and large corpora"): the largest
measured one whose tables are about a third of the parameters. The others read bytes: they are compared with the paper.
Next: settings.py, what each setting means and its default; cli/commands/training/presets.py, what each takes."""

from __future__ import annotations

from blocktrain.spec import CorpusSpec, ModelSpec, OptimSpec, RunSpec, Stacked, TrainSpec

WHOLE = Stacked(schedule="whole")

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
    "1M": RunSpec(
        name="1M",
        corpus=CorpusSpec(tokenizer="bpe:2048"),
        objective=WHOLE,
        model=ModelSpec(width=120, heads=4, context=256, blocks=4, layers=4),
        train=TrainSpec(steps=2_400, windows=32),
    ),
    "wikitext": RunSpec(
        name="wikitext", corpus=CorpusSpec(source="wikitext-2"), train=TrainSpec(steps=473, windows=32)
    ),
    "novels": RunSpec(
        name="novels",
        corpus=CorpusSpec(source="novels", tokenizer="bpe:8192"),
        objective=WHOLE,
        model=ModelSpec(width=256, heads=8, context=256, blocks=4, layers=8),
        train=TrainSpec(steps=4_000, windows=32),
        optim=OptimSpec(warmup_steps=100),
    ),
    "10M": RunSpec(
        name="10M",
        corpus=CorpusSpec(tokenizer="bpe:8192"),
        objective=WHOLE,
        model=ModelSpec(width=256, heads=8, context=512, blocks=4, layers=8),
        train=TrainSpec(steps=12_000, windows=32),
        optim=OptimSpec(warmup_steps=100),
    ),
    "30M": RunSpec(
        name="30M",
        corpus=CorpusSpec(tokenizer="bpe:8192"),
        objective=WHOLE,
        model=ModelSpec(width=384, heads=6, context=512, blocks=4, layers=12),
        train=TrainSpec(steps=18_000, windows=64),
        optim=OptimSpec(warmup_steps=200),
    ),
    "paper": RunSpec(
        name="paper",
        objective=WHOLE,
        model=ModelSpec(width=768, heads=12, context=1024, blocks=4, layers=16),
        train=TrainSpec(steps=25_000, windows=64),
        optim=OptimSpec(warmup_steps=200),
    ),
}
