"""blocktrain inspect: what a prepared corpus holds. Next: data/shards.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import WIDTH, quantity, say, show_table
from blocktrain.logs import visible

if TYPE_CHECKING:
    from blocktrain.data.shards import PreparedCorpus, Split

SAMPLE_TOKENS = 40


def inspect(
    corpus: Annotated[Path, typer.Argument(metavar="CORPUS", help="The --out of blocktrain prepare.")],
    check: Annotated[bool, typer.Option("--check", help="Also read every shard and compare its hash.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of tables.")] = False,
) -> None:
    """Show what a prepared corpus holds: sizes, shards, tokens."""
    from blocktrain.data.shards import SPLITS, PreparedCorpus

    opened = PreparedCorpus.open(corpus.expanduser())
    opened.require_files()
    if check:
        for split in SPLITS:
            opened.split(split).check()
        say("every shard matches its hash")
    show_corpus(opened, as_json=as_json)


def show_corpus(corpus: PreparedCorpus, *, as_json: bool) -> None:
    """Sizes, the longest documents, and a sample with its tokens."""
    facts = _facts(corpus)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    rows = [
        [name, *(f"{each[key]:,}" for key in ("documents", "shards", "tokens", "text_bytes")), each["bytes_per_token"]]
        for name, each in facts["splits"].items()
    ]
    print(f"tokenizer {facts['tokenizer']}, {facts['vocabulary']:,} tokens")
    show_table(
        ["split", "documents", "shards", "tokens", "bytes of text", "bytes/token"],
        [[*row[:-1], f"{row[-1]:.3f}"] for row in rows],
    )
    duplicates = facts["near_duplicates"]
    print(f"left out: {duplicates:,} near-duplicates of held-out documents, {quantity(facts['duplicate_bytes'], 'B')}")
    longest = [[each["name"], each["split"], f"{each['text_bytes']:,}"] for each in facts["longest"]]
    show_table(["longest documents", "split", "bytes"], longest)
    sample = "sample    " + "|".join(visible(token) for token in facts["sample"])
    print(sample if len(sample) <= WIDTH else f"{sample[: WIDTH - 1]}…")


def _facts(corpus: PreparedCorpus) -> dict[str, Any]:
    from blocktrain.data.shards import SPLITS

    index = corpus.index
    return {
        "path": str(corpus.folder),
        "sources": index.sources,
        "sha256": index.sha256,
        "tokenizer": index.tokenizer,
        "tokenizer_sha256": index.tokenizer_sha256,
        "vocabulary": index.vocabulary,
        "splits": {split: _split_facts(corpus, split) for split in SPLITS},
        "near_duplicates": index.duplicates,
        "duplicate_bytes": index.duplicate_bytes,
        "longest": [entry.model_dump() for entry in index.longest],
        "sample": _sample(corpus),
    }


def _split_facts(corpus: PreparedCorpus, split: Split) -> dict[str, Any]:
    index = corpus.index
    tokens, text_bytes = index.num_tokens(split), index.text_bytes(split)
    return {
        "documents": index.documents[split],
        "shards": len(index.splits[split]),
        "tokens": tokens,
        "text_bytes": text_bytes,
        "bytes_per_token": text_bytes / max(1, tokens),
    }


def _sample(corpus: PreparedCorpus) -> list[str]:
    """The first tokens of the valid split as text."""
    import numpy as np

    tokens = corpus.split("valid")
    first = tokens.take(np.arange(min(SAMPLE_TOKENS, len(tokens))))
    return [corpus.tokenizer.decode([token]).decode("utf-8", "replace") for token in first.tolist()]
