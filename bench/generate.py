"""How fast does one process write, one byte after the other? `blocktrain.generate` and the model exported to
`transformers`, beside transformers' own GPT-2 of the same shape with its KV cache.

    python bench/generate.py [--tokens 200] [--turns 5] [--quick]

One thread, processor time, sampling at temperature 1, untrained weights: what is written does not change what it takes.
The three take turns, A B C C B A, and are compared within a turn, so that a busy machine slows all of them alike.
Needs the extra hf."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.figures import PALETTE
from blocktrain.model.stack import BlockModel
from blocktrain.spec import ModelSpec, preset
from blocktrain.text import generate
from shared.experiment import (
    RESULTS,
    Document,
    Verdict,
    at_least,
    goal_lines,
    machine,
    markdown,
    num_threads,
    table,
    write_json,
    write_pictures,
)

PROMPT = b"The president of the United States "  # shorter than the context of every shape
SHAPES = {"small": "the demo's shape", "wikitext": "the wikitext preset"}
WRITERS = {"ours": "blocktrain.generate", "export": "the Hugging Face export", "gpt2": "GPT-2 in transformers"}
GOALS = {"ours": 2.0, "export": 1.0}  # times GPT-2's rate
Write = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    turns, tokens = (1, 8) if options.quick else (options.turns, options.tokens)
    with num_threads(1), torch.inference_mode():
        shapes = ("tiny",) if options.quick else tuple(SHAPES)
        document: dict[str, Any] = {
            "machine": machine(),
            "settings": {"turns": turns, "prompt_tokens": len(PROMPT)},
            "load": os.getloadavg(),
            "shapes": [measured(name, turns, tokens) for name in shapes],
        }
    write_json(options.out / "generate.json", document)
    print(table(HEAD, _cells(document)), goal_lines(verdicts(document)), sep="\n\n")
    write_pictures(figures(document), options.out)


def measured(name: str, turns: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of processor time, of each writer in each turn."""
    shape = preset(name).model
    tokens = min(tokens, shape.context - len(PROMPT))  # GPT-2 has no window that moves
    writers = writers_of(name, tokens)
    rates: dict[str, list[float]] = {writer: [] for writer in WRITERS}
    for write in writers.values():
        write()  # warms up
    for turn in range(turns):
        order = list(WRITERS) if turn % 2 == 0 else [*reversed(WRITERS)]
        for writer in order:
            began_s = time.process_time()
            writers[writer]()
            rates[writer].append(tokens / max(time.process_time() - began_s, 1e-9))
    return {
        "preset": name,
        "tokens": tokens,
        **{key: getattr(shape, key) for key in ("width", "heads", "layers", "blocks", "context")},
        "tokens_per_cpu_second": {writer: median(each) for writer, each in rates.items()},
        "times_gpt2": {
            writer: median(own / other for own, other in zip(rates[writer], rates["gpt2"], strict=True))
            for writer in GOALS
        },
    }


def writers_of(name: str, tokens: int) -> Mapping[str, Write]:
    """Each writes the same number of tokens behind the same prompt."""
    from blocktrain.hf import BlockTrainConfig, BlockTrainForCausalLM

    spec = preset(name)
    exported = BlockTrainForCausalLM(BlockTrainConfig(spec.model_dump(mode="json"))).eval()
    ours, theirs = BlockModel(spec).eval(), gpt2(spec.model)
    prompt = torch.tensor([list(PROMPT)])
    settings = {
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "do_sample": True,
        "top_k": 0,
        "attention_mask": torch.ones_like(prompt),
        "pad_token_id": 0,
    }
    return {
        "ours": lambda: generate(ours, PROMPT, tokens),
        "export": lambda: exported.generate(prompt, **settings),
        "gpt2": lambda: theirs.generate(prompt, **settings),
    }


def gpt2(shape: ModelSpec) -> Any:
    """With as many layers of the same width and heads, on bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=shape.context,
            n_embd=shape.width,
            n_layer=shape.total_layers,
            n_head=shape.heads,
            bos_token_id=0,
            eos_token_id=None,
        )
    ).eval()


def verdicts(document: Document) -> list[Verdict]:
    return [
        at_least(f"{WRITERS[writer]}, {_named(shape)}, times GPT-2's rate", shape["times_gpt2"][writer], wanted, ".2f")
        for shape in document["shapes"]
        for writer, wanted in GOALS.items()
    ]


HEAD = ["shape", *WRITERS.values(), "ours × GPT-2", "export × GPT-2"]


def _cells(document: Document) -> list[list[str]]:
    return [
        [
            _named(shape),
            *(f"{shape['tokens_per_cpu_second'][writer]:,.0f}" for writer in WRITERS),
            *(f"{shape['times_gpt2'][writer]:.2f}" for writer in GOALS),
        ]
        for shape in document["shapes"]
    ]


def _named(shape: Mapping[str, Any]) -> str:
    return f"{shape['layers']} layers, width {shape['width']}"


def section(document: Document) -> str:
    turns, prompt = document["settings"]["turns"], document["settings"]["prompt_tokens"]
    tokens = " and ".join(str(shape["tokens"]) for shape in document["shapes"])
    return "\n".join(
        [
            "## Writing in one process\n",
            f"Tokens per second of processor time, one byte after the other, with KV caches: {tokens} tokens behind "
            f"{prompt}, one thread, temperature 1, untrained weights. Medians of {turns} turns in one run; the ratios "
            f"are medians of the turns' own. Load of the machine: {document['load'][0]:.1f}.\n",
            markdown(HEAD, _cells(document)),
            goal_lines(verdicts(document)),
        ]
    )


def figures(document: Document) -> dict[str, go.Figure]:
    drawn = go.Figure()
    for (writer, label), color in zip(WRITERS.items(), (PALETTE[5], PALETTE[4], "black"), strict=True):
        rates = [shape["tokens_per_cpu_second"][writer] for shape in document["shapes"]]
        drawn.add_bar(
            name=label,
            x=[_named(shape) for shape in document["shapes"]],
            y=rates,
            text=[f"{rate:,.0f}" for rate in rates],
            marker_color=color,
        )
    drawn.update_layout(
        title="Tokens per second of processor time, one process and one thread",
        yaxis_title="tokens per CPU second",
        template="plotly_white",
        legend={"orientation": "h", "y": -0.1},
        width=900,
        height=520,
        font_size=14,
    )
    return {"generate": drawn}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200, help="to write, at most as many as the context holds")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--quick", action="store_true", help="the tiny preset and a few tokens")
    return parser


if __name__ == "__main__":
    main()
