"""The Ray cluster that a fleet runs on: the one that this machine belongs to, or one that is started here. Ray's own
errors become ours. Next: fleet.py, which uses the cluster."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.io.private import OWNER_ONLY, write_private

AUTO = "auto"
TOKEN_MODE = "token"
AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
REACH_S = 5.0
START_LIMIT_S = 300.0  # a busy machine may take minutes
TICK_S = 0.2
LOG_FILE = "ray.log"
# A fleet uses no ray:// clients: without grpc Ray starts no server for them. Nor the processes that LEAN leaves out.
RAY = "import sys; sys.modules['grpc'] = None; from ray.scripts.scripts import main; main()"
LEAN = ("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor")
START = (sys.executable, "-c", RAY, "start", "--block", "--disable-usage-stats")
REMEDY = (
    "run this on a machine of the cluster (ray start --head, or ray start --address=HOST:6379, adds one), or leave "
    "--ray out"
)


@dataclass(frozen=True)
class Cluster:
    address: str
    process: int | None  # of `ray start`, if it was started here


@contextmanager
def joined(address: str, namespace: str, start_in: Path | None = None) -> Iterator[Cluster]:
    """This process is a driver of the cluster inside the block. With `start_in`, a cluster is started where `auto`
    finds none; its log goes to that folder."""
    ray = _ray(start=address == AUTO and start_in is not None)
    if address == AUTO:
        cluster = _found(ray, namespace) or _started(ray, namespace, start_in)
    else:
        _require_reachable(address)
        try:
            _init(ray, address, namespace)
        except ConnectionError as error:
            raise ConfigError(f"no Ray cluster answers at {address} ({_sentence(error)}): {REMEDY}") from None
        cluster = Cluster(address, None)
    try:
        yield cluster
    finally:
        ray.shutdown()


def end(process: int) -> None:
    """Ends a cluster that `joined` started, with all its processes."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)


def _ray(start: bool) -> Any:
    """The module, imported only now: it reads its variables then."""
    if find_spec("ray") is None:
        raise ConfigError("a fleet needs Ray, which is not installed: pip install 'blocktrain[ray]'")
    _use_authentication(start)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as later versions: no warning about it
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    return ray


def _init(ray: Any, address: str, namespace: str) -> None:
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(
            f"the Ray cluster at {address} refuses this user ({_sentence(error)}): copy the token of its first machine "
            f"(~/.ray/auth_token) to this one, or set {AUTH_TOKEN_PATH}"
        ) from None
    except ConnectionError:
        raise  # there is none
    except (ray.exceptions.RayError, RuntimeError, ValueError, OSError, AssertionError) as error:
        raise ConfigError(f"the Ray cluster at {address} cannot be used ({_sentence(error)}): {REMEDY}") from None


def _found(ray: Any, namespace: str) -> Cluster | None:
    try:
        _init(ray, AUTO, namespace)
    except ConnectionError:
        return None
    return Cluster(AUTO, None)


def _started(ray: Any, namespace: str, folder: Path | None) -> Cluster:
    """A cluster of this machine alone, with authentication."""
    if folder is None:
        raise ConfigError(f"no Ray cluster runs on this machine: {REMEDY}; blocktrain fleet up starts one")
    port, log = _free_port(), folder / LOG_FILE
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ONLY), "wb") as output:
        process = subprocess.Popen(
            [*START, "--head", f"--port={port}", *LEAN],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"127.0.0.1:{port}"
    try:
        _await_start(ray, address, namespace, process, log)
    except BaseException:
        end(process.pid)
        raise
    return Cluster(address, process.pid)


def _await_start(ray: Any, address: str, namespace: str, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            _require_reachable(address)
            _init(ray, address, namespace)
            return
        except (ConfigError, ConnectionError) as error:
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise ConfigError(f"Ray does not start here ({_sentence(error)}): read {log}") from None
        time.sleep(TICK_S)


def _require_reachable(address: str) -> None:
    """Ray itself would try for a long time."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(f'--ray "{address}" is not the address of a Ray cluster: give HOST:PORT, or auto ({REMEDY})')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        detail = error.strerror or str(error)
        raise ConfigError(f"no Ray cluster answers at {address} ({detail}): {REMEDY}") from None


def _use_authentication(start: bool) -> None:
    """Ray's own, if there is a token where Ray looks for it: in its variables, or in ~/.ray/auth_token. Before a
    cluster is started there must be one. Ray reads the mode when it is imported."""
    path = Path(os.environ.get(AUTH_TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    if AUTH_MODE in os.environ:
        return
    if start and not os.environ.get(AUTH_TOKEN) and not path.exists():
        write_private(path, secrets.token_hex(32).encode())
    if os.environ.get(AUTH_TOKEN) or path.exists():
        os.environ[AUTH_MODE] = TOKEN_MODE


def has_authentication() -> bool:
    """Whether the cluster that started this process wants a token of everybody."""
    return os.environ.get(AUTH_MODE, "").lower() == TOKEN_MODE


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
