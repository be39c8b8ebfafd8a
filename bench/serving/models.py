"""The models that bench/serve.py serves: given as run directories, or trained here, small and quickly; and held-out
prompts. Next: modes.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from blocktrain.cli.shared.stage_processes import split_blocks
from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.io.checkpoint import RunDirectory, copy_as
from blocktrain.model.block import block_shapes
from blocktrain.spec import Denoise, RunSpec, preset
from blocktrain.train.distil import DEFAULT_STEPS, distil
from blocktrain.train.reference import equal_work_steps, reference_of
from blocktrain.train.run import train_run
from shared.experiment import with_text

CONTEXT = 512
STAGES = 3  # for whose first one a drafter is distilled
SPAN_SHARE = 0.5
SPAN_STEPS, QUICK_STEPS = 300, 2


@dataclass(frozen=True)
class Models:
    """Run directories: the blocks with a drafter, the same end to end, and blocks trained to denoise spans."""

    model: Path
    reference: Path
    denoise: Path


def trained(spec: RunSpec, work: Path) -> Path:
    """The run directory of a spec, trained where it is not yet."""
    spec, corpus = with_text(spec)
    run = RunDirectory.create(work / f"serve-{spec.name}-{spec.digest()[:8]}", spec, corpus.sha256)
    run.save_tokenizer(corpus.tokenizer.file)
    train_run(run, corpus)
    return run.path


def obtain(
    model: Path | None,
    reference: Path | None,
    denoise: Path | None,
    *,
    spans: bool,
    corpus: str,
    work: Path,
    quick: bool,
) -> Models:
    """What was given, and the rest trained on the corpus; without `spans` no model is trained to denoise them."""
    two = obtain_two(model, reference, corpus=corpus, work=work, quick=quick)
    if denoise is None:
        denoise = trained(span_spec(block_spec(corpus, quick), quick), work) if spans else two["model"]
    return Models(**two, denoise=denoise)


def obtain_two(model: Path | None, reference: Path | None, *, corpus: str, work: Path, quick: bool) -> dict[str, Path]:
    """The blocks with a drafter, and the same end to end."""
    base = block_spec(corpus, quick)
    reference_spec = reference_of(base, steps=equal_work_steps(base))
    return {
        "model": model or with_drafter(trained(base, work), base, quick),
        "reference": reference or trained(reference_spec, work),
    }


def with_drafter(plain: Path, spec: RunSpec, quick: bool) -> Path:
    """A copy of the run with a drafter for the first of three stages."""
    path = plain.with_name(f"{plain.name}-drafter")
    if path.exists() and RunDirectory.open(path).manifest().drafters:
        return path
    copy = copy_as(RunDirectory.open(plain), path, torch.float32, partial(block_shapes, spec))
    last = split_blocks(spec.model.blocks, STAGES)[0][-1]
    distil(copy, load_corpus(spec.corpus, spec.model.context), last, QUICK_STEPS if quick else DEFAULT_STEPS)
    return path


def block_spec(corpus: str, quick: bool) -> RunSpec:
    """The small preset with fewer but longer windows, so that a prompt and an output of 256 bytes fit into one."""
    if quick:
        return with_text(preset("tiny").with_(**{"train.steps": QUICK_STEPS}), corpus)[0]
    longer = {"model.context": CONTEXT, "train.windows": 4096 // CONTEXT}
    return with_text(preset("small").with_(**longer), corpus)[0]


def span_spec(base: RunSpec, quick: bool) -> RunSpec:
    """A model that minutes can train: it shows what a denoising sweep costs, not how well it can write."""
    changes = {"model.context": 2 * base.model.context, "train.windows": base.train.windows // 2} if quick else {}
    steps = {} if quick else {"train.steps": SPAN_STEPS}
    return base.with_(name="spans", objective=Denoise(span_share=SPAN_SHARE), **changes, **steps)


def held_out_texts(corpus: Corpus, count: int, prompt_bytes: int, text_bytes: int) -> list[tuple[bytes, bytes]]:
    """Prompts from all over the held-out split, each behind a space or a line's end, and what follows them there."""
    tokens = corpus.test if isinstance(corpus.test, np.ndarray) else corpus.test.take(np.arange(len(corpus.test)))
    data, length = corpus.tokenizer.decode(tokens.tolist()), prompt_bytes + text_bytes
    texts = []
    for number in range(count):
        at = (len(data) - length - 200) * number // count
        at += next((n + 1 for n, byte in enumerate(data[at : at + 200]) if byte in b" \n"), 0)
        texts.append((data[at : at + prompt_bytes], data[at + prompt_bytes : at + length]))
    return texts
