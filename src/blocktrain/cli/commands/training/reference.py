"""blocktrain reference: trains the same layers end to end, on the same text and budget. Next: train/reference.py."""

from __future__ import annotations

from shlex import quote
from typing import Annotated

import typer

from blocktrain.cli.machine import chosen_device, use_threads
from blocktrain.cli.options import (
    Budget,
    BudgetOption,
    Changes,
    CorpusSource,
    DeviceName,
    Out,
    Preset,
    Seed,
    TensorBoard,
    Threads,
    Toml,
    read_spec,
    warn_about_text,
)


def reference(
    out: Out,
    toml: Toml = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    work: BudgetOption = Budget.EQUAL,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Number of steps, instead of --work.")] = None,
    tensorboard: TensorBoard = None,
    device: DeviceName = None,
    threads: Threads = None,
) -> None:
    """Train the same model end to end, for comparison.

    It has the same shape, text, order of the text and optimiser as the blocks."""
    spec = read_spec(toml, preset, corpus, seed, changes)

    from blocktrain.cli.shared.training import describe, open_text, show_parameters_side_by_side, train_into, twin_of

    use_threads(threads)
    own_device = chosen_device(device)
    warn_about_text(spec)
    spec, text = open_text(spec)
    twin = twin_of(spec, work, steps)
    describe(twin, own_device)
    show_parameters_side_by_side(spec, twin)
    train_into(out, twin, text, tensorboard=tensorboard, device=own_device)
    print(f"{out} holds the reference; next: blocktrain eval RUN {quote(str(out))}")
