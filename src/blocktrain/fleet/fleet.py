"""A fleet on a Ray cluster that this process has joined: made, listed, made larger or smaller, and taken down. Its
members are named, detached actors, which Ray starts again, on another machine if it must. Nothing about a fleet is
stored: the actors are it. Next: member.py, what an actor does; cluster.py, which joins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.util import list_named_actors
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from blocktrain.errors import ConfigError
from blocktrain.fleet.member import FleetAccess, Member, remote
from blocktrain.fleet.plan import (
    COORDINATOR,
    GATEWAY,
    STAGE,
    WORKER,
    FleetPlan,
    Share,
    in_order,
    namespace_of,
    require_room,
    role_of,
    workers_to_add,
    workers_to_stop,
)

START_LIMIT_S = 1800.0  # until a coordinator has read its text and made its blocks
PLACE_S = 60.0
PROBE_S = 30.0
TICK_S = 0.2
CALLS = 8  # at the same time: a status is answered while a member stops
Say = Callable[[str], None]
Answer = TypeVar("Answer")
WAITS = "waits for a machine with enough free CPUs, GPUs and memory, or is being started again"
SILENT = {"node": None, "process": None, "state": "starting", "note": WAITS, "starts": 0, "address": None}


def members(name: str) -> list[str]:
    """In the order of roles and numbers. The driver's namespace must be the fleet's."""
    assert ray.get_runtime_context().namespace == namespace_of(name)
    return in_order(list_named_actors())


def require_members(name: str) -> list[str]:
    found = members(name)
    if COORDINATOR not in found:
        raise ConfigError(f'no fleet "{name}" is up on this Ray cluster: start it with blocktrain fleet up')
    return found


def require_down(name: str) -> None:
    if members(name):
        raise ConfigError(
            f'fleet "{name}" is already up: change it with blocktrain fleet scale, end it with blocktrain fleet down, '
            f"or give this one another --name"
        )


def up(plan: FleetPlan, workers: int, say: Say) -> FleetAccess:
    """Starts all members. Returns when the coordinator answers; the others start meanwhile."""
    require_down(plan.name)
    _require_room(workers, plan.worker, len(plan.blocks), plan.stage)
    try:
        coordinator = _make(plan, COORDINATOR, **_coordinator_place(plan))
        access = _await_access(coordinator)
        say(f"the coordinator runs on {plan.node}; its files are in {plan.folder}")
        for number in range(1, workers + 1):
            _make(plan, f"{WORKER}-{number}", **_share(plan.worker), scheduling_strategy="SPREAD")
        if plan.blocks:
            _make_stages(plan)
            _make(plan, GATEWAY, resources=_at(plan.node))
    except BaseException:
        down(plan.name, 0.0, lambda line: None)
        raise
    return access


def status(name: str) -> dict[str, Any]:
    """What each member does, and where the fleet is reached. A member that does not answer is being placed or moved."""
    found = require_members(name)
    answers = _ask_all(found, Member.status)
    facts = [answers.get(member) or {"name": member, **SILENT} for member in found]
    access = _ask_all([COORDINATOR], Member.access).get(COORDINATOR)
    gateway = next((each["address"] for each in facts if each["name"] == GATEWAY), None)
    machines = [_machine(node) for node in ray.nodes() if node["Alive"]]
    dashboard = access.dashboard if access else None
    return {"name": name, "dashboard": dashboard, "gateway": gateway, "members": facts, "machines": machines}


def scale(name: str, workers: int, grace_s: float, say: Say) -> None:
    found = require_members(name)
    plan = _ask_all([COORDINATOR], Member.plan).get(COORDINATOR)
    if plan is None:
        raise ConfigError(
            f'the coordinator of fleet "{name}" does not answer: wait until blocktrain fleet status shows it'
        )
    added, stopped = workers_to_add(found, workers), workers_to_stop(found, workers)
    if added:
        _require_room(len(added), plan.worker, 0, plan.stage)
    for member in added:
        _make(plan, member, **_share(plan.worker), scheduling_strategy="SPREAD")
    if added:
        say(f"started {', '.join(added)}")
    if stopped:
        _stop(stopped, grace_s, say)


def down(name: str, grace_s: float, say: Say) -> FleetPlan | None:
    """Serving ends first, then the workers submit their work, then the coordinator ends. The run stays.
    Returns the plan if the coordinator still knew it."""
    found = members(name)
    plan = _ask_all([each for each in found if each == COORDINATOR], Member.plan).get(COORDINATOR)
    for roles in ((GATEWAY,), (STAGE,), (WORKER,), (COORDINATOR,)):
        _stop([member for member in found if role_of(member) in roles], grace_s, say)
    with suppress(ValueError):  # it may have no stages
        remove_placement_group(get_placement_group(_stages_group(name)))
    return plan


# Actors


def _make(plan: FleetPlan, member: str, **options: Any) -> Any:
    settings = {"num_cpus": 0, **options}
    actor = ray.remote(Member).options(
        name=member, lifetime="detached", max_restarts=-1, max_concurrency=CALLS, **settings
    )
    try:
        return actor.remote(plan, member)
    except ValueError:  # the name is taken: somebody else starts the same fleet now
        raise ConfigError(f'"{member}" of fleet "{plan.name}" exists already: see blocktrain fleet status') from None


def _coordinator_place(plan: FleetPlan) -> dict[str, Any]:
    """Here, where its folder and the text are. If the run is in a database and a bucket, on any machine later.
    It reserves one byte: Ray puts an actor that reserves nothing on any machine, whatever it prefers."""
    if not plan.store.is_shared:
        return {"resources": _at(plan.node)}
    here = ray.get_runtime_context().get_node_id()
    return {"memory": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True)}


def _make_stages(plan: FleetPlan) -> None:
    """Each on another machine if there are enough: one that is lost then takes one stage with it."""
    bundle = {name: amount for name, amount in _bundle(plan.stage).items() if amount}
    group = placement_group(
        [bundle] * len(plan.blocks), strategy="SPREAD", name=_stages_group(plan.name), lifetime="detached"
    )
    if not group.wait(PLACE_S):
        raise ConfigError(
            f"Ray does not place {len(plan.blocks)} stages of {plan.stage} on the machines that are there: ask for "
            f"fewer (--stages), or reserve less for each (--stage-memory, --stage-gpus)"
        )
    for index, member in enumerate(plan.stages):
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        _make(plan, member, **_share(plan.stage), scheduling_strategy=place)


def _stages_group(name: str) -> str:
    return f"{namespace_of(name)}-stages"


def _share(share: Share) -> dict[str, Any]:
    return {"num_cpus": share.cpus, "num_gpus": share.gpus, "memory": share.memory_bytes or None}


def _bundle(share: Share) -> dict[str, float]:
    return {"CPU": share.cpus, "GPU": share.gpus, "memory": share.memory_bytes}


def _at(node: str) -> dict[str, float]:
    """Every machine has this resource, also after it was away: a member that needs it stays there."""
    return {f"node:{node}": 0.001}


def _await_access(coordinator: Any) -> FleetAccess:
    give_up_s = time.monotonic() + START_LIMIT_S
    while True:
        access: FleetAccess | None = ray.get(coordinator.access.remote())
        if access is not None:
            return access
        facts = ray.get(coordinator.status.remote())
        if facts["state"] == "failing":
            raise ConfigError(f"the coordinator does not start, {facts['note']}")
        if time.monotonic() > give_up_s:
            raise ConfigError(f"the coordinator did not answer for {START_LIMIT_S:g} s: read the file log in its --dir")
        time.sleep(TICK_S)


def _ask_all(
    found: Sequence[str], method: Callable[..., Answer], *arguments: Any, limit_s: float = PROBE_S
) -> dict[str, Answer]:
    """The answers by member to a call of this method of `Member`. Who does not answer in time is left out."""
    asked = {}
    for member in found:
        try:
            asked[member] = remote(ray.get_actor(member), method, *arguments)
        except ValueError:
            continue  # it has ended since
    ready: Iterable[Any] = ray.wait([*asked.values()], num_returns=len(asked), timeout=limit_s)[0] if asked else ()
    done, answers = set(ready), dict[str, Answer]()
    for member, reference in asked.items():
        try:
            if reference in done:
                answers[member] = ray.get(reference)
        except ray.exceptions.RayError:
            continue  # it died meanwhile
    return answers


def _stop(found: Sequence[str], grace_s: float, say: Say) -> None:
    """Asks the members to stop and waits for them, then ends their actors for good. One whose machine is gone cannot
    answer: what it acknowledged is in the ledger."""
    if not found:
        return
    present = _ask_all(found, Member.status)
    ended = _ask_all([*present], Member.stop, grace_s, limit_s=grace_s + PROBE_S)
    for member in found:
        try:
            ray.kill(ray.get_actor(member), no_restart=True)
        except ValueError:
            continue
    if late := [member for member in found if not ended.get(member)]:
        say(f"ended without submitting what was begun: {', '.join(late)}")
    if in_time := [member for member in found if ended.get(member)]:
        say(f"stopped {', '.join(in_time)}")


def _require_room(workers: int, worker: Share, stages: int, stage: Share) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    require_room(workers, worker, stages, stage, nodes, ray.available_resources())


def _machine(node: Mapping[str, Any]) -> dict[str, Any]:
    resources = node["Resources"]
    amounts = {
        "cpus": resources.get("CPU", 0),
        "gpus": resources.get("GPU", 0),
        "memory_bytes": resources.get("memory", 0),
    }
    return {"address": node["NodeManagerAddress"], **amounts}


def has_idle_gpus(plan: FleetPlan) -> bool:
    return not plan.worker.gpus and ray.cluster_resources().get("GPU", 0) > 0


def own_address() -> str:
    return str(ray.util.get_node_ip_address())
