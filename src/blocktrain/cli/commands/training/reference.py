"""blocktrain reference: the same layers, data and budget, trained end to end. Next: train/reference.py."""

from __future__ import annotations

from typing import Annotated

import typer

from blocktrain.cli.options import Changes, CorpusSource, Out, Preset, Seed, TensorBoard, Toml, Work, WorkOf, read_spec


def reference(
    out: Out,
    toml: Toml = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    work: WorkOf = Work.EQUAL,
    steps: Annotated[int | None, typer.Option(metavar="N", help="As many steps instead.")] = None,
    tensorboard: TensorBoard = None,
) -> None:
    """Train the same model end to end, for comparison.

    Same shape, text, order and optimiser."""
    spec = read_spec(toml, preset, corpus, seed, changes)

    from blocktrain.cli.shared.training import describe, show_parameters_side_by_side, train_into, twin_of
    from blocktrain.data.corpus import load_corpus

    twin = twin_of(spec, work, steps)
    text = load_corpus(twin.corpus, twin.model.context)
    describe(twin)
    show_parameters_side_by_side(spec, twin)
    train_into(out, twin, text, tensorboard=tensorboard)
    print(f"{out} holds the reference; measure it beside the blocks: blocktrain eval RUN {out}")
