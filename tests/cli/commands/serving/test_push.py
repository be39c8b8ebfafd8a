"""blocktrain push, against a server that speaks the part of the Hub's API that huggingface_hub uses. The requests are
real; large files go by git-lfs's protocol, as they do where the Hub's own transfer is switched off."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("huggingface_hub", reason="needs the extra: pip install 'blocktrain[hf]'")
from huggingface_hub import constants

TOKEN = "hf_not-a-real-token"
OWNER = "alice"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the library's own request


@dataclass
class Hub:
    """The repositories of a small Hub, and every request that it got."""

    url: str = ""
    repos: dict[str, dict[str, Any]] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # large files by SHA-256
    requests: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        if method == "PUT":  # a presigned address: no token
            oid = path.removeprefix("/store/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.stored[oid] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/validate-yaml":
            bad = 'license: "none of them"' in json.loads(body)["content"]
            return (400, {"errors": [{"message": '"license" must be one of [mit]'}]}) if bad else (200, {})
        if path == "/api/repos/create":
            return self._create(**json.loads(body))
        name = path.removeprefix("/api/models/").removeprefix("/")
        repo = next((self.repos[each] for each in self.repos if name.startswith(each)), None)
        return (404, {"error": "Repository not found"}) if repo is None else self._of(repo, name, body)

    def _create(self, name: str, organization: str, visibility: str, **_: Any) -> tuple[int, Any]:
        full = f"{organization}/{name}"
        if organization != OWNER:
            return 403, {"error": f"You don't have the rights to create a model under {organization}"}
        status = 409 if full in self.repos else 200
        self.repos.setdefault(full, {"visibility": visibility, "files": {}, "commits": []})
        return status, {"url": f"{self.url}/{full}"}

    def _of(self, repo: dict[str, Any], name: str, body: bytes) -> tuple[int, Any]:
        if "/tree/" in name:
            return 200, [{"type": "file", "path": x, "size": 1, "oid": "0"} for x in repo["files"]]
        if "/preupload/" in name:
            paths = [each["path"] for each in json.loads(body)["files"]]
            modes = {path: "lfs" if "safetensors" in path else "regular" for path in paths}
            return 200, {"files": [{"path": x, "uploadMode": modes[x], "shouldIgnore": False} for x in paths]}
        if name.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{**x, "actions": {"upload": {"href": f"{self.url}/store/{x['oid']}"}}} for x in objects]
            return 200, {"objects": actions, "transfer": "basic"}
        assert "/commit/main" in name
        head, *operations = [json.loads(line) for line in body.splitlines()]
        repo["commits"].append(head["value"]["summary"])
        for operation in operations:
            key, value = operation["key"], operation["value"]
            if key == "deletedFile":
                del repo["files"][value["path"]]
            else:
                large = key == "lfsFile"
                content = self.stored[value["oid"]] if large else base64.b64decode(value["content"])
                repo["files"][value["path"]] = content
        return 200, {"commitUrl": f"{self.url}/{OWNER}/x/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            path, _, _ = self.path.partition("?")
            status, document = hub.answer(self.command, path, self.headers.get("authorization") or "", body)
            answer = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = _serve  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # what HF_ENDPOINT sets when the library is loaded
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_new_repository_is_private_and_gets_the_whole_model_in_one_commit(run, trained, hub):
    result = run("push", trained[0], "alice/speeches", "--license", "mit")
    assert result.exit_code == 0, result.stderr
    repo = hub.repos["alice/speeches"]
    assert (repo["visibility"], len(repo["commits"])) == ("private", 1)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(repo["files"])
    card = repo["files"]["README.md"].decode()
    assert 'license: "mit"' in card
    assert "| state | trained |" in card
    assert f"{hub.url}/alice/speeches" in result.stdout
    assert TOKEN not in result.stdout + result.stderr


def test_a_second_push_replaces_the_weights_and_leaves_what_others_added(run, trained, hub):
    old = {"model-00001-of-00002.safetensors": b"old", "picture.png": b"theirs"}
    hub.repos["alice/speeches"] = {"visibility": "public", "files": dict(old), "commits": []}
    assert run("push", trained[0], "alice/speeches", "--message", "Better").exit_code == 0
    repo = hub.repos["alice/speeches"]
    assert repo["visibility"] == "public"
    assert repo["commits"] == ["Better"]
    assert "picture.png" in repo["files"]
    assert "model-00001-of-00002.safetensors" not in repo["files"]
    assert "No licence was stated" in repo["files"]["README.md"].decode()


def test_a_dry_run_lists_the_files_without_a_request_or_a_token(run, trained, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    result = run("push", trained[0], "alice/speeches", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "model.safetensors" in result.stdout
    assert "private if it is new" in result.stderr
    assert hub.requests == []


@pytest.mark.parametrize(
    "repo, options, token, words",
    [
        ("bob/speeches", [], TOKEN, ["refuses to write bob/speeches", "403", "hf auth login"]),
        ("alice/speeches", [], "hf_wrong", ["refuses to write alice/speeches", "401", "HF_TOKEN"]),
        ("alice/speeches", [], "", ["no access token for http://", "HF_TOKEN"]),
        ("speeches", [], TOKEN, ["not the name of a repository", "OWNER/NAME"]),
        ("alice/spee ches", [], TOKEN, ["not the name of a repository"]),
        ("alice/speeches", ["--license", "none of them"], TOKEN, ["license", "another --license"]),
    ],
)
def test_a_push_that_cannot_work_says_what_to_do(run, trained, hub, monkeypatch, tmp_path, repo, options, token, words):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "nothing"))
    result = run("push", trained[0], repo, *options)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert not any(each["commits"] for each in hub.repos.values())


def test_an_unreachable_hub_and_a_folder_that_is_no_export_are_named(run, trained, hub, monkeypatch, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        result = run("push", trained[0], "alice/speeches")
    assert result.exit_code == 2
    assert "cannot be reached" in result.stderr
    assert "HF_ENDPOINT" in result.stderr
    assert "no spec.toml" in run("push", tmp_path, "alice/speeches").stderr
    (tmp_path / "config.json").touch()
    assert "give the directory of the run" in run("push", tmp_path, "alice/speeches").stderr
