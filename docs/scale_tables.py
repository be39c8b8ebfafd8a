"""Computes the tables of docs/scale.md from shapes, codecs, measured counts and stated prices, and writes them between
their marks. tests/docs/test_scale.py compares the page with them.

    python docs/scale_tables.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from blocktrain.model.block import block_shapes
from blocktrain.spec import RunSpec, Stacked, preset
from blocktrain.train.memory_estimate import STATE_BYTES
from blocktrain.wire.codecs.table import make_codec, update_codec

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
MARK = re.compile(r"(<!-- table: (\w+) -->\n)(?:(?!<!-- end -->).)*?(\n<!-- end -->)", re.DOTALL)

SHAPES = {  # name: width, layers, blocks, heads
    "0.1": (768, 16, 4, 12),
    "1": (1536, 32, 8, 16),
    "10": (4096, 48, 16, 32),
    "75": (8192, 93, 31, 64),
}
WORKERS = (100, 10_000, 1_000_000)
ROUND_S = 600.0  # a lease takes ten minutes of computing; transfers come on top
PUT_PRICE, GET_PRICE, STORED_PRICE = 5e-6, 4e-7, 0.023  # dollars per request, per request, per GB and month
MONTH_S = 30 * 86_400.0


@dataclass(frozen=True)
class Model:
    """What one phase of a model moves: a block and its scaffold."""

    name: str
    parameters: int
    trained: int  # parameters of a phase
    spec: RunSpec

    def update_bytes(self, codec: str) -> int:
        swarm = self.spec.swarm.model_copy(update={"update": codec})
        return update_codec(swarm, self.spec.phases[0].steps, swarm.round_steps).num_bytes(self.trained)

    @property
    def download_bytes(self) -> int:
        """Of the next version, by the default codec, for a worker that has the one before."""
        return make_codec(self.spec.swarm.download).num_bytes(self.trained)

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and two moments of a phase. Activations come on top."""
        return STATE_BYTES * self.trained

    @property
    def kept_bytes(self) -> int:
        """Versions that the bucket keeps of all blocks, as float32."""
        return 4 * self.spec.swarm.keep_versions * self.parameters


@cache
def models() -> tuple[Model, ...]:
    return tuple(_model(name, *shape) for name, shape in SHAPES.items())


def _model(name: str, width: int, layers: int, blocks: int, heads: int) -> Model:
    shape = {"model.width": width, "model.layers": layers, "model.blocks": blocks, "model.heads": heads}
    spec = preset("paper").with_(**shape, objective=Stacked())
    size = sum(math.prod(each) for each in block_shapes(spec, 0).values())  # all blocks have one shape
    return Model(name, blocks * size, len(spec.phases[0].blocks) * size, spec)


@cache
def counts() -> Mapping[str, Any]:
    """Per update that comes in parts, as those of large models do, measured with one coordinator."""
    measured = json.loads((ROOT / "bench" / "results" / "scale_out.json").read_text())["counts"]
    found = next(x for x in measured if (x["coordinators"], x["work"]) == (1, "updates in parts"))
    bucket = found["bucket_requests"]
    writes = sum(bucket.get(method, 0) for method in ("PUT", "POST", "DELETE"))
    per_update = {"puts": writes, "gets": sum(bucket.values()) - writes}
    per_update |= {name: found[name] for name in ("requests", "statements", "writing_statements", "rows")}
    return {name: number / found["clients"] for name, number in per_update.items()}


def per_worker() -> str:
    head = [
        "parameters (10⁹)",
        "blocks",
        "trained at once (10⁹)",
        "memory for its state",
        "update, int8",
        "update, vector",
    ]
    rows = [
        [
            f"{model.parameters / 1e9:.3g}",
            str(model.spec.model.blocks),
            f"{model.trained / 1e9:.3g}",
            amount(model.state_bytes),
            amount(model.update_bytes("int8")),
            amount(model.update_bytes("vector")),
            amount(model.download_bytes),
        ]
        for model in models()
    ]
    return _table([*head, "next version, int6"], rows)


def coordinator() -> str:
    """What all workers together ask of the coordinators, in each second."""
    found = counts()
    rows = []
    for workers in WORKERS:
        updates = workers / ROUND_S
        each = [number(updates * found[name]) for name in ("requests", "statements", "writing_statements", "rows")]
        rows.append([f"{workers:,}", number(updates), *each, number(updates * found["rows"] * 86_400)])
    head = ["workers", "updates/s", "requests/s", "statements/s", "of them writing", "rows/s", "rows per day"]
    return _table(head, rows)


def traffic() -> str:
    rows = []
    for workers in WORKERS:
        for model in models():
            updates = workers / ROUND_S
            moved = [model.update_bytes("int8"), model.update_bytes("vector"), model.download_bytes]
            rows.append([f"{workers:,}", model.name, *(f"{amount(updates * each)}/s" for each in moved)])
    return _table(["workers", "parameters (10⁹)", "in, int8", "in, vector", "out, int6"], rows)


def bucket() -> str:
    """Per month, without traffic. Updates are deleted when their round can no longer need them."""
    found, rows = counts(), []
    for workers in WORKERS:
        updates = workers / ROUND_S * MONTH_S
        requests = updates * (found["puts"] * PUT_PRICE + found["gets"] * GET_PRICE)
        for model in models():
            rounds_kept = 2  # the open one, and the one that is merged
            stored = model.kept_bytes + rounds_kept * workers * model.update_bytes("vector")
            cells = [amount(stored), number(stored / 1e9 * STORED_PRICE), number(requests)]
            rows.append([f"{workers:,}", model.name, *cells])
    return _table(["workers", "parameters (10⁹)", "stored, vector", "storage, $", "requests, $"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float) -> str:
    """Three digits, and no powers of ten."""
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f"{round(value, 2 - math.floor(math.log10(value))):,.{digits}f}"


def amount(num_bytes: float) -> str:
    for size, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.3g} B"


TABLES = {"per_worker": per_worker, "coordinator": coordinator, "traffic": traffic, "bucket": bucket}


def filled(page: str) -> str:
    """The page with its tables computed anew. The excuse is for tests/docs/test_figures.py."""
    excuse = "\n<!-- not measured: computed by docs/scale_tables.py, and compared by a test -->"
    return MARK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{excuse}{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
