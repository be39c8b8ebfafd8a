"""blocktrain distil: a drafter for the first stage of a trained model, so that speculative decoding takes fewer
traversals. Next: train/distil.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import require_positive


def distil(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of train or export, with all blocks.")],
    stages: Annotated[int, typer.Option(help="Stages that will serve it: the first one drafts.")] = 3,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 100,
    corpus: Annotated[str | None, typer.Option(metavar="PATH", help="Train on this text instead of the run's.")] = None,
) -> None:
    """Train a drafter for the first stage: faster serving.

    The drafter is one more block on the first stage, a copy of the block after it, trained to predict as the whole
    model does. Give the number of stages that blocktrain serve will start. For other numbers of stages, distil a
    copy of the model for each."""
    require_positive("--steps", steps)

    from blocktrain.cli.shared.scoring import open_trained, text_of
    from blocktrain.cli.shared.stage_processes import split_blocks
    from blocktrain.train.distil import distil as train_drafter

    opened = open_trained(run)
    last = split_blocks(opened.spec.model.blocks, stages)[0][-1]
    found = train_drafter(opened, text_of(opened, corpus), last, steps)
    say(
        f"The drafter behind block {last} agrees with the whole model on {found.after:.1%} of held-out tokens; without "
        f"it, {found.before:.1%}. blocktrain serve {run} --stages {stages} uses it."
    )
