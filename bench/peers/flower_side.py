"""Flower's side: a SuperLink with a ServerApp, and a SuperNode with a ClientApp for every worker, as its documentation
deploys them (--insecure: no TLS on loopback, as on the other sides). Next: flower_app.py, what they run.

    python flower_side.py drive CELL"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from work import Cell, Memory, Rounds, await_open, free_port, started, write_result

HERE, BIN = Path(__file__).parent, Path(sys.executable).parent
POLL_S = 0.05
TASK_POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.02"}  # seconds until a message's process is started; default 1
APP = """
[project]
name = "peers"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "blocktrain"
[tool.flwr.app.components]
serverapp = "peers_app.flower_app:server_app"
clientapp = "peers_app.flower_app:client_app"
[tool.flwr.app.config]
"""


def write_app(folder: Path) -> Path:
    app = folder / "app"
    (app / "peers_app").mkdir(parents=True)
    (app / "pyproject.toml").write_text(APP)
    (app / "peers_app" / "__init__.py").touch()
    shutil.copy(HERE / "flower_app.py", app / "peers_app")
    return app


def environment(cell: Cell, address: str) -> dict[str, str]:
    home = Path(cell.folder) / "flower"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
    )
    return {
        **os.environ,
        **TASK_POLL,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PEERS_CELL": str(cell),
        "PYTHONPATH": str(HERE),
    }


def drive(cell: Cell) -> None:
    port, said = free_port(), Path(cell.folder) / "said.json"
    env = environment(cell, f"127.0.0.1:{port}")
    app = write_app(Path(cell.folder))
    with ExitStack() as stack:
        link_command = [str(BIN / "flower-superlink"), "--insecure", "--port", str(port)]
        link = stack.enter_context(started([*link_command, "--disable-runtime-dependency-installation"], env=env))
        await_open(port, link)
        node_command = [str(BIN / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}"]
        nodes = [
            stack.enter_context(
                started([*node_command, "--port", str(free_port()), "--node-config", f"number={number}"], env=env)
            )
            for number in range(cell.workers)
        ]
        groups = {"central": [link.pid], **{f"worker {n}": [node.pid] for n, node in enumerate(nodes)}}
        with Memory(lambda: groups) as memory:
            subprocess.run([str(BIN / "flwr"), "run", str(app), "here"], env=env, check=True)
            while not said.exists():
                if any(process.poll() is not None for process in (link, *nodes)):
                    raise RuntimeError("a SuperLink or SuperNode ended before the rounds did")
                time.sleep(POLL_S)
    found: dict[str, Any] = json.loads(said.read_text())
    measured = Rounds(found["seconds"], found["loopback_bytes"])
    settings = {"flwr": version("flwr"), "numpy": np.__version__, "reply_poll_s": POLL_S, **TASK_POLL}
    write_result(cell, measured, found["errors"], memory, settings)


if __name__ == "__main__":
    drive(Cell.read(sys.argv[2]))
