"""generate: whole characters, repeatable text, clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from blocktrain.cli.commands.training.generate import harmless


def test_a_terminal_gets_no_control_characters():
    assert harmless("a\x1b[2Jb\tc\n\x07") == "a�[2Jb\tc\n�"


def test_the_text_begins_with_the_prompt_and_depends_on_the_seed(run, trained):
    first, again, other = (
        run("generate", trained[0], "--prompt", "Bier für", "--max-bytes", 8, "--seed", seed).stdout
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.startswith("Bier für")
    assert first.endswith("\n")


def test_at_temperature_zero_the_seed_does_not_matter(run, trained):
    texts = {run("generate", trained[0], "--max-bytes", 4, "--temperature", 0, "--seed", s).stdout for s in (1, 2)}
    assert len(texts) == 1


@pytest.mark.parametrize("mode", ["speculative", "sweep"])
def test_every_mode_writes_the_same_text_for_the_same_seed(run, trained, mode):
    texts = [run("generate", trained[0], "--max-bytes", 20, "--mode", mode).stdout for _ in range(2)]
    assert texts[0] == texts[1]


def test_json_contains_the_cost(run, trained):
    result = run("generate", trained[0], "--max-bytes", 12, "--mode", "sweep", "--candidates", 3, "--json")
    document = json.loads(result.stdout)
    assert (document["bytes"], document["bytes_per_traversal"]) == (12, 12 / document["traversals"])
    assert document["traversals"] <= 2
    assert 1 <= document["exact"] <= 12
    assert document["seconds"] > 0


def test_nothing_is_generated_after_a_stop_string(run, trained):
    whole = run("generate", trained[0], "--max-bytes", 60, "--temperature", 0).stdout
    stop = whole[20:23]
    cut = run("generate", trained[0], "--max-bytes", 60, "--temperature", 0, "--stop", stop).stdout
    assert cut == whole[: whole.index(stop)] + "\n"


def test_a_model_trained_on_spans_writes_them_in_one_sweep(run, tiny, tmp_path):
    spans = ["--set", "objective.kind=denoise", "--set", "objective.span_share=0.5", "--set", "train.steps=1"]
    assert run("train", *tiny, *spans).exit_code == 0
    result = run("generate", tmp_path / "run", "--mode", "sweep", "--max-bytes", 8, "--prompt", "9 bottles")
    assert result.exit_code == 0
    assert result.stdout.startswith("9 bottles")


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--max-bytes", "0"], "max_bytes = 0 is too small: give 1 or more"),
        (["--temperature", "-1"], "temperature = -1.0 is out of range: give 0 or more"),
        (["--temperature", "nan"], "temperature = nan is out of range"),
        (["--top-p", "0"], "top_p = 0.0 is out of range"),
        (["--top-p", "1.5"], "top_p = 1.5 is out of range: give more than 0 and at most 1"),
        (
            ["--candidates", "3"],
            "mode autoregressive has no candidates: leave them out, or choose mode speculative or sweep",
        ),
        (["--draft-bytes", "3"], "drafts nothing: leave draft_bytes out, or choose mode speculative"),
        (["--mode", "speculative", "--draft-bytes", "64"], "draft_bytes = 64 does not fit behind a prompt"),
    ],
)
def test_options_that_make_no_sense_are_named(run, trained, options, complaint):
    result = run("generate", trained[0], *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr


def test_a_half_trained_run_writes_with_what_it_has_and_says_so(run, tiny, tmp_path):
    assert run("train", *tiny, "--block", 0).exit_code == 0
    result = run("generate", tmp_path / "run", "--max-bytes", 5)
    assert result.exit_code == 0
    assert "is unfinished: phase 1 of 3, step 3 of 3; blocks 0 to 1 of 4 answer" in result.stderr


@pytest.mark.parametrize("mode, read", [("autoregressive", 44), ("sweep", 44)])
def test_of_a_prompt_longer_than_the_context_the_end_is_read_and_the_user_is_told(run, trained, mode, read):
    result = run("generate", trained[0], "--prompt", "x" * 76, "--max-bytes", 8, "--mode", mode, "--json")
    assert json.loads(result.stdout)["prompt_bytes_unread"] == 76 - read
    assert f"the prompt has 76 bytes, which is more than the model reads: it read the last {read}" in result.stderr


EVENTS = [
    {"choices": [{"text": "of be"}], "blocktrain": {"bytes_written": 5, "traversals": 1}},
    {"choices": [{"text": "er"}], "blocktrain": {"bytes_written": 7, "traversals": 2}},
]


class Gateway(BaseHTTPRequestHandler):
    """Speaks OpenAI's stream; keeps what it was asked; refuses the prompt "no"."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        if body["prompt"] == "no":
            self._answer(400, json.dumps({"error": {"message": "not that one", "code": "bad"}}))
        else:
            self._answer(200, "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        server.asked, server.url = [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_url_is_used_as_a_gateway(run, gateway):
    options = ["--mode", "sweep", "--candidates", 4, "--stop", "!", "--seed", 3, "--api-key", "secret"]
    result = run("generate", gateway.url, "--prompt", "9 bottles ", *options)
    ((path, body, key),) = gateway.asked
    assert result.stdout == "9 bottles of beer\n"
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert {"mode": "sweep", "candidates": 4, "stop": ["!"], "seed": 3, "stream": True}.items() <= body.items()


def test_a_gateway_s_effort_is_in_the_json(run, gateway):
    document = json.loads(run("generate", gateway.url, "--json").stdout)
    assert (document["text"], document["bytes"], document["traversals"]) == ("of beer", 7, 2)


def test_a_gateway_s_refusal_is_shown(run, gateway):
    result = run("generate", gateway.url, "--prompt", "no")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "refused: not that one" in result.stderr


def test_an_unreachable_gateway_is_named(run, gateway):
    gateway.shutdown()
    gateway.server_close()
    result = run("generate", gateway.url)
    assert result.exit_code == 2
    assert f"{gateway.url} cannot be reached" in result.stderr


def test_asking_a_gateway_does_not_load_torch(gateway):
    code = "import sys; from blocktrain.cli.main import app; app(sys.argv[1:], standalone_mode=False)"
    words = [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)", "generate", gateway.url]
    assert subprocess.run(words, check=False, capture_output=True).returncode == 0
