"""The models that bench/serve.py serves: given as run directories, or trained here, small and quickly. Also how good a
text is under one of them. Next: serve_modes.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from blocktrain.data.corpus import Corpus, load_corpus, raw_bytes
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.stack import BlockModel
from blocktrain.spec import Denoise, RunSpec, preset
from blocktrain.train.reference import equal_work_steps, reference_of
from blocktrain.train.run import load_model, train_run

SPAN_SHARE = 0.5
SPAN_STEPS, QUICK_STEPS = 300, 2
GRAM = 4


@dataclass(frozen=True)
class Models:
    """Run directories: the blocks, the same end to end, and blocks trained to denoise spans."""

    model: Path
    reference: Path
    denoise: Path


def trained(spec: RunSpec, work: Path) -> Path:
    """The run directory of a spec, trained where it is not yet."""
    corpus = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create(work / f"serve-{spec.name}-{spec.digest()[:8]}", spec, corpus.sha256)
    train_run(run, corpus)
    return run.path


def obtain(
    model: Path | None, reference: Path | None, denoise: Path | None, *, corpus: str, work: Path, quick: bool
) -> Models:
    """What was given, and the rest trained on the corpus."""
    base = preset("tiny").with_(**{"train.steps": QUICK_STEPS}) if quick else preset("small")
    base = base.with_(**{"corpus.source": corpus})
    spans = span_spec(base, quick)
    reference_spec = reference_of(base, steps=equal_work_steps(base))
    return Models(
        model or trained(base, work), reference or trained(reference_spec, work), denoise or trained(spans, work)
    )


def span_spec(base: RunSpec, quick: bool) -> RunSpec:
    """A model that minutes can train: it shows what a denoising sweep costs, not how well it can write."""
    changes = {"model.context": 2 * base.model.context, "train.windows": base.train.windows // 2}
    steps = {} if quick else {"train.steps": SPAN_STEPS}
    return base.with_(name="spans", objective=Denoise(span_share=SPAN_SHARE), **changes, **steps)


class Judge:
    """Says how likely a text is under the end-to-end reference, in one process."""

    def __init__(self, reference: Path) -> None:
        self._model = load_model(RunDirectory.open(reference))

    @property
    def context(self) -> int:
        return self._model.spec.model.context

    def nats_per_byte(self, prompt: bytes, text: bytes) -> float:
        """Each byte given all before it that the reference can see; windows move on by half a context."""
        whole, losses, at = prompt + text, [], len(prompt)
        while at < len(whole):
            start = 0 if at < self.context else at - self.context // 2
            end = min(len(whole), start + self.context)
            losses += surprises(self._model, whole[start:end])[at - start - 1 :]
            at = end
        return sum(losses) / len(losses)


def surprises(model: BlockModel, text: bytes) -> list[float]:
    """-log p of every byte but the first."""
    window = torch.tensor([list(text)])
    logits = model.logits(window[:, :-1])[0]
    losses: list[float] = F.cross_entropy(logits.double(), window[0, 1:], reduction="none").tolist()
    return losses


def distinct_grams(text: bytes, length: int = GRAM) -> float:
    """Different runs of `length` bytes, as a share of all: low where a text repeats itself."""
    grams = [text[at : at + length] for at in range(len(text) - length + 1)]
    return len(set(grams)) / max(1, len(grams))


def held_out_texts(corpus: Corpus, count: int, prompt_bytes: int, text_bytes: int) -> list[tuple[bytes, bytes]]:
    """Prompts from all over the held-out split, each behind a space or a line's end, and what follows them there."""
    data, length = bytes(raw_bytes(corpus.test)), prompt_bytes + text_bytes
    texts = []
    for number in range(count):
        at = (len(data) - length - 200) * number // count
        at += next((n + 1 for n, byte in enumerate(data[at : at + 200]) if byte in b" \n"), 0)
        texts.append((data[at : at + prompt_bytes], data[at + prompt_bytes : at + length]))
    return texts
