"""blocktrain train: trains all blocks of a run, or one. Next: cli/shared/training.py."""

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
    block: Annotated[int | None, typer.Option(metavar="K", help="Train only the phase of block K.")] = None,
    jobs: Jobs = 1,
    tensorboard: TensorBoard = None,
) -> None:
    """Train the blocks of a model, each block alone.

    Ctrl-C saves and stops; the same command continues. DIR/metrics.jsonl gets one line per step."""
    spec = read_spec(toml, preset, corpus, seed, changes)

    from blocktrain.cli.shared.training import describe, train_into
    from blocktrain.data.corpus import load_corpus
    from blocktrain.train.run import wanted_phases

    wanted_phases(spec, block)  # refuses an unknown block before the text is loaded
    text = load_corpus(spec.corpus, spec.model.context)
    describe(spec)
    run = train_into(out, spec, text, only_block=block, jobs=jobs, tensorboard=tensorboard)
    trained = ", ".join(map(str, sorted(run.manifest().blocks)))
    print(f"{out} holds trained blocks {trained} of {spec.model.blocks}; next: blocktrain eval {out}")
