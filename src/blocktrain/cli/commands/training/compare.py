"""blocktrain compare: trains and measures blocks and reference, and plots both. Next: cli/shared/comparison.py."""

from __future__ import annotations

from blocktrain.cli.console import say
from blocktrain.cli.options import (
    Budget,
    BudgetOption,
    Changes,
    CorpusSource,
    Jobs,
    MaxWindows,
    Out,
    Preset,
    Seed,
    Toml,
    read_spec,
    require_positive,
    warn_about_text,
)


def compare(
    out: Out,
    toml: Toml = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    work: BudgetOption = Budget.EQUAL,
    jobs: Jobs = 1,
    max_windows: MaxWindows = None,
) -> None:
    """Train blocks and reference, and report both side by side.

    Prints a table; writes curves (HTML and PNG) and a JSON document to DIR."""
    require_positive("--max-windows", max_windows)
    spec = read_spec(toml, preset, corpus, seed, changes)

    from blocktrain.cli.shared.comparison import Side, show, write
    from blocktrain.cli.shared.training import describe, open_text, train_into, twin_of

    warn_about_text(spec)
    spec, text = open_text(spec)
    twin = twin_of(spec, work)
    describe(spec)
    blocks = train_into(out / "blocks", spec, text, jobs=jobs)
    describe(twin)
    reference = train_into(out / "reference", twin, text)
    ours, theirs = (Side.of(run, text, max_windows) for run in (blocks, reference))
    show(ours, theirs)
    for path in write(out, ours, theirs, work):
        say(f"wrote {path}")
