"""blocktrain train: trains all blocks of a run, or one. Next: cli/shared/training.py."""

from __future__ import annotations

from shlex import quote
from typing import Annotated

import typer

from blocktrain.cli.machine import chosen_device, chosen_memory, use_threads
from blocktrain.cli.options import (
    Changes,
    CorpusSource,
    DeviceName,
    From,
    Jobs,
    MemorySize,
    Out,
    Preset,
    Seed,
    TensorBoard,
    Threads,
    Toml,
    read_spec,
    warn_about_text,
)


def train(
    out: Out,
    toml: Toml = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    start_from: From = None,
    block: Annotated[int | None, typer.Option(metavar="K", help="Train only the phase of block K.")] = None,
    jobs: Jobs = 1,
    tensorboard: TensorBoard = None,
    device: DeviceName = None,
    threads: Threads = None,
    memory: MemorySize = None,
) -> None:
    """Train the blocks of a model.

    Ctrl-C saves and stops; the same command continues. DIR/metrics.jsonl gets one line per step. With --from, a new
    run starts from the weights of that model, with a new learning-rate schedule; the model's files do not change."""
    start = None
    if start_from is not None:
        from blocktrain.train.start import open_start

        start = open_start(start_from)
    spec = read_spec(toml, preset, corpus, seed, changes, start)

    from blocktrain.cli.shared.training import describe, open_text, train_into
    from blocktrain.train.run import wanted_phases

    use_threads(threads)
    own_device = chosen_device(device)
    wanted_phases(spec, block)  # refuses an unknown block before the text is loaded
    warn_about_text(spec)
    spec, text = open_text(spec)
    spec = start.fitted(spec) if start else spec
    describe(spec, own_device)
    memory_bytes = chosen_memory(memory, own_device)
    run = train_into(
        out,
        spec,
        text,
        start=start,
        only_block=block,
        jobs=jobs,
        tensorboard=tensorboard,
        device=own_device,
        memory_bytes=memory_bytes,
    )
    trained = ", ".join(map(str, sorted(run.manifest().blocks)))
    print(f"{out} holds trained blocks {trained} of {spec.model.blocks}; next: blocktrain eval {quote(str(out))}")
