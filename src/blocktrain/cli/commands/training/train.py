"""blocktrain train: all blocks of a run, or one. Next: training.py."""

from __future__ import annotations

from typing import Annotated

import typer

from blocktrain.cli.options import Changes, CorpusSource, Jobs, Out, Preset, Seed, TensorBoard, Toml, read_spec


def train(
    out: Out,
    toml: Toml = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    block: Annotated[int | None, typer.Option(metavar="K", help="Train the phase of block K only.")] = None,
    jobs: Jobs = 1,
    tensorboard: TensorBoard = None,
) -> None:
    """Train the blocks of a model, each by itself.

    Ctrl-C stops and saves; the same command continues. Every step is a line of metrics.jsonl in DIR."""
    spec = read_spec(toml, preset, corpus, seed, changes)

    from blocktrain.cli.shared.training import describe, train_into
    from blocktrain.data.corpus import load_corpus
    from blocktrain.train.run import wanted_phases

    wanted_phases(spec, block)  # a block that is none is said before the wait
    text = load_corpus(spec.corpus, spec.model.context)
    describe(spec)
    run = train_into(out, spec, text, only_block=block, jobs=jobs, tensorboard=tensorboard)
    trained = ", ".join(map(str, sorted(run.manifest().blocks)))
    print(f"{out} holds trained blocks {trained} of {spec.model.blocks}; measure it: blocktrain eval {out}")
