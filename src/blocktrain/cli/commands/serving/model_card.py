"""The model card that blocktrain push writes: what the model is, how it was trained, and under which licence. It names
no worker. Next: push.py, which sends it."""

from __future__ import annotations

import json

from blocktrain.cli.console import counted, quantity
from blocktrain.cli.shared.story import SwarmStory, history, story_of_export
from blocktrain.cli.shared.training import parameters_of_blocks, shape_of, training_text
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.spec import BYTES
from blocktrain.swarm.coordinator.watching.curves import answer_of
from blocktrain.train.flops import run_flops

CARD_FILE = "README.md"
NO_LICENCE = (
    "No licence was stated when this model was pushed. Ask the owner of this repository before you use it. "
    "The licence of the training text may also apply to the blocks."
)
LICENCE = (
    "`{licence}`, as stated by the owner of this repository. It covers the blocks, to which every worker "
    "of the run contributed. The licence of the training text may also apply to them."
)
USE = """```python
import blocktrain.hf  # pip install 'blocktrain[hf]'
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{repo}")
```"""


def model_card(run: RunDirectory, repo: str, licence: str | None = None) -> str:
    story = story_of_export(run.path, run.spec)
    head = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["blocktrain"]}
    if licence is not None:
        head["license"] = licence
    metadata = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())  # JSON is YAML
    rows = [f"| {name} | {_cell(value)} |" for name, value in [*_model(run), *_training(run, story)]]
    return "\n".join(
        [
            "---",
            metadata,
            "---",
            "",
            f"# {_cell(run.spec.name)}",
            "",
            f"A language model that was trained in {counted(run.spec.model.blocks, 'block')} with BlockTrain.",
            "",
            USE.format(repo=repo),
            "",
            "| | |",
            "| --- | --- |",
            *rows,
            "",
            "## Licence",
            "",
            NO_LICENCE if licence is None else LICENCE.format(licence=licence),
            "",
        ]
    )


def _model(run: RunDirectory) -> list[tuple[str, str]]:
    spec = run.spec
    unit = "bytes" if spec.corpus.tokenizer_sha256 is None else "tokens"
    return [
        ("parameters", f"{sum(parameters_of_blocks(spec)):,}"),
        ("shape", shape_of(spec.model)),
        ("objective", spec.objective.kind),
        ("tokenizer", spec.corpus.tokenizer or BYTES),
        ("context", f"{spec.model.context} {unit}"),
        ("training text", f"{spec.corpus.name}, SHA-256 {run.manifest().corpus_sha256}"),
        ("settings", f"digest {spec.digest()}"),
    ]


def _training(run: RunDirectory, story: SwarmStory | None) -> list[tuple[str, str]]:
    unfinished = [phase for phase in run.spec.phases if phase.index not in run.manifest().finished]
    rows = [("state", f"training continues: {counted(len(unfinished), 'phase')} left" if unfinished else "trained")]
    if story is not None:
        return [*rows, *_swarm(story)]
    losses, _ = history(run.metrics())
    scores = [each["nats_per_byte"] for each in run.samples() if each.get("nats_per_byte") is not None]
    if scores:
        rows.append(("held-out loss", f"{scores[-1]:.4f} nats/byte on some windows of the valid split"))
    return [
        *rows,
        ("steps, all phases", f"{sum(map(len, losses.values())):,}"),
        ("text seen, all phases", training_text(run.spec)),
        ("work, all phases", quantity(run_flops(run.spec), "FLOP")),
    ]


def _swarm(story: SwarmStory) -> list[tuple[str, str]]:
    updates = [each["update"] for each in story.contributions]
    answer = answer_of(story.evaluations[-1]["scores"]) if story.evaluations else None
    rows = [("held-out loss", f"{answer['nats_per_byte']:.4f} nats/byte at the last evaluation")] if answer else []
    return [
        *rows,
        ("workers", f"{len(story.workers):,}"),
        ("merged updates", f"{len(updates):,}, {quantity(sum(x['num_bytes'] for x in updates), 'B')}"),
        ("steps of all workers", f"{sum(x['steps'] for x in updates):,}"),
        ("text seen by all workers", quantity(sum(x["tokens"] for x in updates), "B")),
    ]


def _cell(value: str) -> str:
    """One cell of a Markdown table: names of runs and files may hold anything."""
    text = "".join(char if char.isprintable() else " " for char in value)
    for mark in "\\|<>[]`*_":
        text = text.replace(mark, f"\\{mark}")
    return text
