"""blocktrain serve: which options it refuses. tests/e2e/test_serve_process.py runs it."""

from __future__ import annotations

import socket

import pytest


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--stages", "9"], "--stages 9 does not fit a model of 4 blocks"),
        (["--host", "0.0.0.0"], "would be open to all"),
        (["--host", "0.0.0.0", "--tls-cert", "c", "--tls-key", "k"], "c is not a file"),
        (["--poll", "-1"], "--poll -1 is too small"),
    ],
)
def test_bad_options_are_refused_with_a_remedy(run, trained, options, sentence):
    result = run("serve", trained[0], *options)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_a_taken_port_is_an_error(run, trained):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", trained[0], "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "is taken" in result.stderr
