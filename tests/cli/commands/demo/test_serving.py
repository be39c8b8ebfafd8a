"""The race of the decoding modes: what it shows. tests/e2e/test_demo_process.py runs it over real stages."""

from __future__ import annotations

from dataclasses import replace

from blocktrain.cli.commands.demo.serving import ABOUT, Lane, race_results
from blocktrain.cli.shared.gateway_client import Output
from blocktrain.serve.decode.request import Mode, Request

REQUEST = Request(b"The president", max_tokens=100)


def lanes() -> list[Lane]:
    costs = {Mode.AUTOREGRESSIVE: (100, 24.0), Mode.SPECULATIVE: (12, 3.0), Mode.SWEEP: (1, 0.5)}
    return [
        Lane(replace(REQUEST, mode=mode), 100, 100, Output(" of the state", 100, number, 100 / number, seconds, 0))
        for mode, (number, seconds) in costs.items()
    ]


def test_the_race_compares_with_the_slowest_and_fits_a_narrow_terminal(capsys):
    race_results(lanes())
    out, said = capsys.readouterr()
    assert [line.split()[:5] for line in said.splitlines() if "×" in line] == [
        ["autoregressive", "100", "24.0", "s", "1.0×"],
        ["speculative", "12", "3.0", "s", "8.0×"],
        ["sweep", "1", "0.5", "s", "48.0×"],
    ]
    assert max(map(len, said.splitlines())) < 80
    assert out.count("The president of the state") == len(ABOUT)
