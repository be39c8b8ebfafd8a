"""What the page of results says of text.py: tokenizers at equal work, preparing, memory against the corpus size."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from blocktrain.figures import bar_figure
from blocktrain.model.block import physical_parameters, table_parameters
from blocktrain.spec import RunSpec, preset
from blocktrain.tables import with_vocabulary
from shared.experiment import Document, Verdict, at_least, at_most, goal_lines, markdown
from training.rows import Row, signed, summarise

HEAD = [
    "row",
    "parameters",
    "in tables",
    "tokens seen",
    "text seen",
    "tokens/s",
    "text/s",
    "valid",
    "gap",
    "test",
    "gap",
]
MEGABYTE = 10**6
GOAL_VOCABULARY = 8192  # of the model whose tables may be a third of its parameters
GOAL_SHAPE = preset("wikitext").with_(**{"model.width": 256, "model.heads": 8})


MEMORY_HEAD = [
    "corpus",
    "preparing",
    "training",
    "time for drawing windows",
    "fetched before the first step",
    "fetched then",
    "per hour at most",
]


def table_share(spec: RunSpec) -> float:
    return table_parameters(spec) / physical_parameters(spec)


def summary_lines(document: Document) -> list[dict[str, Any]]:
    rows = [
        Row(name, label, "equal work", _unused, reference="bytes-e2e") for name, label in document["labels"].items()
    ]
    lines = summarise(rows, document["results"])
    for line in lines:
        record = next(each for each in document["results"].values() if each["row"] == line["row"])
        tokenizer = "-".join(line["row"].split("-")[: 2 if line["row"].startswith("bpe") else 1])
        line["tokens_per_cpu_s"] = record["train_bytes"] / record["cpu_seconds"]
        line["bytes_per_token"] = document["bytes_per_token"][tokenizer]
        line["table_share"] = table_share(RunSpec.model_validate(record["spec"]))
    return lines


def _unused(base: RunSpec, steps: int) -> RunSpec:
    raise NotImplementedError("rows of a finished document are not run")


def cells(document: Document) -> list[list[str]]:
    return [
        [
            line["label"],
            f"{line['parameters']:,}",
            f"{line['table_share']:.0%}",
            f"{line['train_bytes']:,}",
            f"{line['train_bytes'] * line['bytes_per_token'] / MEGABYTE:.1f} MB",
            f"{line['tokens_per_cpu_s']:,.0f}",
            f"{line['tokens_per_cpu_s'] * line['bytes_per_token'] / 1000:.1f} kB",
            f"{line['valid']:.4f}",
            signed(line["valid_gap"]),
            f"{line['test']:.4f}",
            signed(line["test_gap"]),
        ]
        for line in document["summary"]
    ]


def section(document: Document) -> str:
    speed = document["prepare"]
    source = next(iter(document["results"].values()))["spec"]["corpus"]["source"]
    text = source.removesuffix("-bytes").partition("-bpe-")[0]  # a prepared corpus is named for its tokenizer too
    parts = [
        f"## Tokenizers{' and large corpora' if document.get('memory') else ''}: {text}\n",
        f"Every row does the work of {document['steps']} end-to-end steps on bytes. The loss is all nats over all "
        "bytes of the held-out text, the same text for every row. The gap is to bytes, end to end. Speeds are per "
        "second of one processor core. Tables have the width that a run gets by default, unless they are said to "
        "be wide, which is as wide as the model.\n",
        markdown(HEAD, cells(document)),
        f"Preparing takes one CPU second per {speed['prepare_bytes_per_cpu_s'] / MEGABYTE:.2f} MB of text; the "
        f"tokenizers library alone encodes {speed['library_bytes_per_cpu_s'] / MEGABYTE:.2f} MB in one.\n",
    ]
    if samples := document.get("samples"):
        parts += [
            "What the model of the preset small writes about the speeches with bytes, and with the demo's tokenizer "
            "and as many steps as take no longer, on one machine:\n",
            *map(_sample, samples),
        ]
    if memory := document.get("memory"):
        parts += [
            "Generated corpora of several sizes, bytes, with the model of the preset small. Preparing and training are "
            "processes of their own; memory is the peak above what their imports take. The worker fetches at most two "
            "shards for 64 steps, and nothing twice while its cache has room: a model with longer steps fetches less "
            "per hour.\n",
            markdown(MEMORY_HEAD, [_memory_cells(size, memory[size]) for size in sorted(memory, key=int)]),
        ]
    else:
        parts.append("Memory against the size of the text is not measured in this file.\n")
    return "\n".join([*parts, goal_lines(verdicts(document))])


def _preparing(sample: Document) -> str:
    """Older results have none."""
    seconds = sample.get("prepare_cpu_seconds")
    return "" if seconds is None else f" and {seconds:.1f} of preparing"


def _sample(sample: Document) -> str:
    texts = "\n\n".join(text.strip() for text in sample["texts"])
    return (
        f"`{sample['tokenizer']}`, {sample['valid']:.4f} nats/byte, {sample['steps']} steps in the first phase, "
        f"{sample['cpu_seconds']:.0f} CPU seconds{_preparing(sample)} ({sample['machine']['processor']}):\n\n"
        f"```text\n{texts}\n```\n"
    )


def _memory_cells(size: str, measured: Document) -> list[str]:
    return [
        f"{int(size):,} MB",
        f"{measured['prepare_peak_bytes'] / MEGABYTE:.0f} MB",
        f"{measured['peak_bytes'] / MEGABYTE:.0f} MB",
        f"{measured['drawing_share']:.2%}",
        f"{measured['first_step_bytes'] / 2**20:.1f} MiB",
        f"{measured['later_bytes'] / 2**20:.1f} MiB in {measured['later_s']:.0f} s",
        f"{3600 * measured['later_bytes'] / measured['later_s'] / 2**30:.1f} GiB",
    ]


def figures(document: Document) -> dict[str, go.Figure]:
    lines = document["summary"]
    figure = bar_figure(
        [line["label"] for line in lines],
        [line["valid"] for line in lines],
        title="Held-out loss at equal work",
        x_title="tokenizer, tables and training",
        y_title="nats per byte",
    )
    return {"text": figure}


def _wide_twin(row: str) -> str:
    """bpe-8192-blocks -> bpe-8192-wide-blocks"""
    name, _, way = row.rpartition("-")
    return f"{name}-wide-{way}"


def verdicts(document: Document) -> list[Verdict]:
    lines = {line["row"]: line for line in document["summary"]}
    found = [
        at_most(f"{line['label']}: nats/byte above wide tables", line["valid"] - wide["valid"], 0.0, "+.4f")
        for row, line in lines.items()
        if (wide := lines.get(_wide_twin(row))) is not None
    ]
    found.append(
        at_most(
            f"bpe:{GOAL_VOCABULARY} at width {GOAL_SHAPE.model.width}: share of the parameters in tables",
            table_share(with_vocabulary(GOAL_SHAPE, GOAL_VOCABULARY)),
            1 / 3,
        )
    )
    share = document["prepare"]["ratio"]
    found.append(at_least("preparing, as a share of the library's speed", share, 0.8, ".2f"))
    memory = document.get("memory", {})
    sizes = sorted(memory, key=int)
    if len(sizes) > 1:
        small, large = (memory[size]["peak_bytes"] for size in (sizes[0], sizes[-1]))
        found.append(at_most(f"memory at {sizes[-1]} MB against {sizes[0]} MB of text", large / small, 1.1, ".2f"))
    found += [
        at_most(
            f"MiB that a worker fetches before its first step, of {size} MB",
            memory[size]["first_step_bytes"] / 2**20,
            32.0,
            ".1f",
        )
        for size in sizes[-1:]
    ]
    found += [
        at_most(f"share of drawing windows at {size} MB", memory[size]["drawing_share"], 0.01) for size in sizes[-1:]
    ]
    return found
