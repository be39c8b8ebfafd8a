"""Serve a model from three processes and stream a completion with the official `openai` client.

    pip install openai
    python examples/serve_and_stream.py                 # trains a tiny model first, under a minute
    python examples/serve_and_stream.py --model run/    # serves a model that `blocktrain train` or `export` wrote

Each stage is a process that holds some blocks. The gateway in front of them speaks OpenAI's completions API. On your
own machines the stages run on different hosts: see docs/serving.md."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

from blocktrain import RunDirectory, load_corpus, preset, train_run

START_S = 120.0  # the longest that the stages may take to start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; without it a tiny model is trained first")
    parser.add_argument("--corpus", default="sotu", help="the text for the tiny model (default: sotu)")
    parser.add_argument("--prompt", default="The people of ", help="the text to continue")
    parser.add_argument("--max-bytes", type=int, default=120, help="length of each completion (default: 120)")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="blocktrain-example-") as folder:
        # 1. A model to serve.
        model = arguments.model or train_tiny(Path(folder) / "run", arguments.corpus)

        # 2. Three stages and a gateway, as processes of their own on free ports.
        with served(model, Path(folder)) as url:
            client = OpenAI(base_url=url, api_key="none-needed-on-this-machine")
            name = client.models.list().data[0].id
            print(f"{url} serves {name}")

            # 3. The same completion three ways. Only the number of passes over the network differs:
            #    autoregressive asks all stages for every byte; speculative drafts several bytes at the first stage and
            #    checks them in one pass, with exactly the same distribution; a sweep writes everything in one pass.
            for mode in ("autoregressive", "speculative", "sweep"):
                started_s = time.perf_counter()
                print(f"\n{mode}: {arguments.prompt}", end="", flush=True)
                stream = client.completions.create(
                    model=name,
                    prompt=arguments.prompt,
                    max_tokens=arguments.max_bytes,
                    temperature=0.7,
                    seed=1,
                    stream=True,
                    extra_body={"mode": mode},
                )
                for event in stream:
                    if event.choices:
                        print(event.choices[0].text, end="", flush=True)
                print(f"\n  {time.perf_counter() - started_s:.1f} s")


def train_tiny(folder: Path, source: str) -> Path:
    spec = preset("tiny").with_(**{"train.steps": 60, "corpus.source": source})
    corpus = load_corpus(spec.corpus, spec.model.context)
    print("training a tiny model …", flush=True)
    train_run(RunDirectory.create(folder, spec, corpus.sha256), corpus)
    return folder


@contextmanager
def served(model: Path, folder: Path) -> Iterator[str]:
    """`blocktrain serve` on a free port; gives the URL of its API, and stops everything at the end."""
    address = folder / "gateway.json"
    command = [sys.executable, "-m", "blocktrain", "serve", model, "--stages", "3", "--port", "0"]
    command += ["--address-file", address]
    with subprocess.Popen(list(map(str, command))) as process:
        try:
            give_up_s = time.monotonic() + START_S
            while not address.exists():  # it appears whole, when the gateway answers
                if process.poll() is not None or time.monotonic() > give_up_s:
                    raise SystemExit("blocktrain serve did not start: see its message above")
                time.sleep(0.1)
            yield json.loads(address.read_text())["address"]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
