"""A member of a fleet as a Ray actor: a supervised command of blocktrain, and what it must ask the other members before
it can start. The command does the work, and is the one that runs without Ray. Secrets go from actor to actor and into
files of their owner only: no command line, log or name of an actor holds one.
Next: supervisor.py, which keeps the command running; fleet.py, which makes the actors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from blocktrain.errors import BlockTrainError
from blocktrain.fleet.cluster import has_authentication
from blocktrain.fleet.plan import COORDINATOR, GATEWAY, STAGE, WORKER, FleetPlan, number_of, role_of
from blocktrain.fleet.supervisor import ADDRESS_FILE, Launch, Supervisor
from blocktrain.http.limits import is_loopback
from blocktrain.io.address_file import read_address
from blocktrain.io.private import read_private, write_private
from blocktrain.wire.invite import INVITE_FILE, bracketed, parse_invite

SETTINGS_FILE, CHAIN_KEY_FILE = "fleet.toml", "chain.key"
VIEWER_FILE = "invite-viewer"  # in a coordinator's directory
ASK_S = 30.0  # a member that does not answer within this time is asked again later
FOLLOW_STAGES_S, FOLLOW_COORDINATOR_S = 2.0, 5.0  # how often to look whether they have moved

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class FleetAccess:
    """What members need to reach each other. Not for logs."""

    invite: str = field(repr=False)
    dashboard: str = field(repr=False)  # with a viewer's access token
    chain_key: str = field(repr=False)
    can_serve: bool  # every block has a first version
    authenticated: bool  # Ray wants a token of everybody


class Member:
    """The actor. Ray starts it again, with the same arguments, when its process or its machine is gone."""

    def __init__(self, plan: FleetPlan, name: str) -> None:
        self._plan, self._name, self._role = plan, name, role_of(name)
        self._folder = plan.folder_of(name)
        launches = {COORDINATOR: self._coordinator, WORKER: self._worker, STAGE: self._stage, GATEWAY: self._gateway}
        moves = FOLLOW_COORDINATOR_S if plan.store.is_shared and self._role != COORDINATOR else None
        follow_s = FOLLOW_STAGES_S if self._role == GATEWAY else moves
        self._supervisor = Supervisor(
            self._folder, launches[self._role], follow_s=follow_s, may_finish=self._role == WORKER
        )
        self._supervisor.start()

    def plan(self) -> FleetPlan:
        return self._plan

    def status(self) -> dict[str, Any]:
        facts = asdict(self._supervisor.state)
        return {"name": self._name, "node": own_node(), "process": os.getpid(), **facts}

    def stop(self, grace_s: float) -> bool:
        """Returns when the command has ended: a worker has submitted its work."""
        return self._supervisor.stop(grace_s)

    def access(self) -> FleetAccess | None:
        """Of the coordinator, once it answers. The files alone are not enough: they may be of an earlier start."""
        from blocktrain.swarm.worker.client import CoordinatorClient

        own, viewer = read_private(self._folder / INVITE_FILE), read_private(self._folder / VIEWER_FILE)
        if own is None or viewer is None or self._supervisor.state.state != "running":
            return None
        invite = parse_invite(own.decode())
        try:
            with CoordinatorClient(invite, patience_s=0.0) as client:
                manifest = client.manifest()
        except BlockTrainError:
            return None
        can_serve = len(manifest.blocks) == manifest.spec["model"]["blocks"]
        page = parse_invite(viewer.decode()).page
        return FleetAccess(str(invite), page, self._chain_key(), can_serve, has_authentication())

    def _chain_key(self) -> str:
        from blocktrain.serve.chain.sockets import new_key_text

        path = self._folder / CHAIN_KEY_FILE
        if not path.exists():
            write_private(path, new_key_text().encode())
        return path.read_text()

    # How each command is started, or why it cannot be yet

    def _coordinator(self) -> Launch:
        """It keeps its port, which its invite names. On another machine than the first, the run is in the database, and
        there are neither settings nor text."""
        host, settings = own_node(), self._folder / SETTINGS_FILE
        tls = () if is_loopback(host) else ("--tls-self-signed",)
        given = (str(settings),) if settings.exists() else ()
        words = ("coordinator", *given, "--dir", str(self._folder), "--host", host, *tls, *self._plan.store.words)
        return Launch(words, self._plan.work_folder if given else None)

    def _worker(self) -> Launch | str:
        if (missing := self._get_access()) is not None:
            return missing
        memory = ("--memory", str(self._plan.worker.memory_bytes)) if self._plan.worker.memory_bytes else ()
        device = () if self._plan.worker.gpus else ("--device", "cpu")
        home = ("--home", str(self._folder), "--name", self._name)
        return self._launch("worker", f"@{self._folder / INVITE_FILE}", *home, *memory, *device)

    def _stage(self) -> Launch | str:
        if (missing := self._get_access()) is not None:
            return missing
        listen = f"tcp://{bracketed(own_node())}:{self._last_port() or '*'}"
        device = () if self._plan.stage.gpus else ("--device", "cpu")
        follow = ("--poll", f"{self._plan.poll_s:g}", "--home", str(self._folder))
        blocks = ("--blocks", self._plan.blocks[number_of(self._name) - 1])
        words = ("stage", f"@{self._folder / INVITE_FILE}", *blocks, "--listen", listen, *follow, *device)
        return self._launch(*words, *self._chain_words())

    def _gateway(self) -> Launch | str:
        """It is started again when a stage has moved to another machine."""
        if (missing := self._get_access()) is not None:
            return missing
        addresses = []
        for stage in self._plan.stages:
            address = (self._ask(stage, Member.status) or {}).get("address")
            if address is None:
                return f"{stage} does not serve yet"
            addresses.append(address)
        port = ("--host", "127.0.0.1", "--port", str(self._plan.port))
        return self._launch("gateway", "--stages", ",".join(addresses), *port, *self._chain_words())

    def _launch(self, *words: str) -> Launch:
        """Of a command that reads its secrets from files: when the coordinator has moved, these are others."""
        secrets = [read_private(self._folder / name) or b"" for name in (INVITE_FILE, CHAIN_KEY_FILE)]
        own = secrets[1:] if self._role == GATEWAY else secrets  # it does not ask the coordinator
        return Launch(words, secrets_sha256=hashlib.sha256(b"\n".join(own)).hexdigest())

    def _chain_words(self) -> tuple[str, ...]:
        return ("--keys", str(self._folder / CHAIN_KEY_FILE), "--address-file", str(self._folder / ADDRESS_FILE))

    def _last_port(self) -> int | None:
        """A stage that comes back on the same machine is found where it was."""
        address = urlsplit(read_address(self._folder / ADDRESS_FILE) or "")
        return address.port if address.hostname == own_node() else None

    def _get_access(self) -> str | None:
        """Writes what the coordinator gives into this member's files. Returns why it cannot."""
        access = self._ask(COORDINATOR, Member.access)
        if access is None:
            return "the coordinator does not answer yet"
        if self._role != WORKER and not access.can_serve:
            return "the training of some blocks has not begun yet"
        _write_changed(self._folder / INVITE_FILE, access.invite)
        if self._role != WORKER:
            _write_changed(self._folder / CHAIN_KEY_FILE, access.chain_key)
        return None

    def _ask(self, member: str, method: Callable[[Member], Answer]) -> Answer | None:
        """None while there is no answer."""
        import ray

        try:
            actor = ray.get_actor(member, namespace=self._plan.namespace)
            answer: Answer = ray.get(remote(actor, method), timeout=ASK_S)
        except (ray.exceptions.RayError, ValueError):
            return None
        return answer


def remote(actor: Any, method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls this method of `Member` where the actor is. Returns Ray's reference to the answer at once."""
    return getattr(actor, method.__name__).remote(*arguments)


def own_node() -> str:
    """The address by which the other machines of the cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def _write_changed(path: Path, text: str) -> None:
    if read_private(path) != text.encode():
        write_private(path, text.encode())
