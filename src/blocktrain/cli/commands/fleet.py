"""blocktrain fleet: a whole swarm, with serving, on the machines of a Ray cluster. Its commands join the cluster and
act on the fleet's actors. Next: fleet/fleet.py, which does it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
import typer

from blocktrain.cli.console import say, show_line, show_table, wrapped
from blocktrain.cli.help import Command, Group
from blocktrain.cli.machine import parse_size
from blocktrain.cli.options import (
    Changes,
    CorpusSource,
    PollSeconds,
    Preset,
    Presigned,
    Seed,
    Toml,
    read_spec,
    require_above_zero,
    require_positive,
    warn_about_text,
)
from blocktrain.errors import ConfigError
from blocktrain.fleet.plan import FleetPlan, Share, Store, namespace_of
from blocktrain.io.files import write_whole
from blocktrain.logs import visible
from blocktrain.spec import settings_of

if TYPE_CHECKING:
    from blocktrain.spec import RunSpec

PROCESS_BYTES = 500 * 10**6  # of a worker or stage, beside its tensors
STAGE_CACHE_BYTES = 2**30  # the default of blocktrain stage --cache
NO_AUTHENTICATION = (
    "warning: this Ray cluster has no authentication, so everybody who reaches its ports controls it: run ray "
    "get-auth-token --generate on its first machine, copy the file to the others and start Ray again"
)

RayAddress = Annotated[
    str, typer.Option("--ray", metavar="ADDRESS", help="HOST:PORT of the Ray cluster. auto: the one of this machine.")
]
FleetName = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the fleet on its cluster.")]
Grace = Annotated[float, typer.Option("--grace", metavar="SECONDS", help="Time that a worker has to submit its work.")]

fleet = typer.Typer(cls=Group, no_args_is_help=True, help="Run a whole swarm on the machines of a Ray cluster.")


@fleet.command(cls=Command, epilog="Example:  blocktrain fleet up run.toml --ray auto --workers 8 --stages 3")
def up(
    toml: Toml = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    ray: RayAddress = "auto",
    name: FleetName = "fleet",
    workers: Annotated[int, typer.Option(metavar="N", help="Number of workers.")] = 2,
    stages: Annotated[int, typer.Option(metavar="N", min=0, help="Number of serving stages; 0 serves nothing.")] = 0,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="The coordinator's directory, on this machine.")
    ] = Path("fleet-run"),
    ledger: Annotated[str | None, typer.Option(metavar="URL", help="PostgreSQL database, for the coordinator.")] = None,
    blobs: Annotated[str | None, typer.Option(metavar="URL", help="Bucket (s3://, …), for the coordinator.")] = None,
    presigned: Presigned = None,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of all other members, on every machine. Default: ~/.cache/blocktrain/fleet."
        ),
    ] = None,
    cpus: Annotated[float, typer.Option(metavar="N", help="CPUs that each worker and stage reserves.")] = 1.0,
    gpus: Annotated[float, typer.Option(metavar="N", min=0, help="GPUs of each worker.")] = 0.0,
    stage_gpus: Annotated[float, typer.Option(metavar="N", min=0, help="GPUs of each stage.")] = 0.0,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of each worker. Default: what training takes.")
    ] = None,
    stage_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of each stage. Default: its blocks and KV caches.")
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port of the gateway; 0 is any.")] = 8000,
    poll: PollSeconds = 10.0,
) -> None:
    """Start a coordinator, workers, stages and a gateway on a Ray cluster.

    Uses the cluster that this machine belongs to, or starts one here.
    Prints the URLs and the invite, then exits; the fleet keeps running.
    The same command after fleet down continues the run."""
    namespace_of(name)  # refuses a wrong one
    require_positive("--workers", workers)
    require_above_zero("--poll", poll)
    if not cpus > 0:
        raise ConfigError(f"--cpus {cpus:g} is too small: give a number above 0, for example 0.5")
    spec = read_spec(toml, preset, corpus, seed, changes)
    warn_about_text(spec)
    blocks, stage_bytes = _stage_shares(spec, stages)
    worker = Share(cpus, gpus, parse_size("--memory", memory) if memory else _worker_bytes(spec))
    stage = Share(cpus, stage_gpus, parse_size("--stage-memory", stage_memory) if stage_memory else stage_bytes)
    own, here, store = folder.absolute(), home.absolute() if home else None, Store(ledger, blobs, presigned)
    plan = FleetPlan(name, own, Path.cwd(), "", worker, stage, blocks, port, here, poll, store=store)
    _start(plan, ray, workers, tomli_w.dumps(settings_of(spec)).encode())


def _start(plan: FleetPlan, address: str, workers: int, settings: bytes) -> None:
    from blocktrain.fleet.cluster import end, joined

    with joined(address, plan.namespace, start_in=plan.folder) as cluster:
        from blocktrain.fleet import fleet as on_ray
        from blocktrain.fleet.member import SETTINGS_FILE

        plan = replace(plan, node=on_ray.own_address(), ray_process=cluster.process)
        try:
            on_ray.require_down(plan.name)
            plan.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(plan.folder / SETTINGS_FILE, settings)
            access = on_ray.up(plan, workers, say)
        except BaseException:
            if cluster.process is not None:
                end(cluster.process)
            raise
        if not access.authenticated:
            say(NO_AUTHENTICATION)
        if on_ray.has_idle_gpus(plan):
            say("the cluster has GPUs and no worker uses one: give --gpus 1 to train on them")
    _announce(plan, access.dashboard, access.invite)


def _announce(plan: FleetPlan, dashboard: str, invite: str) -> None:
    say(f"dashboard (read-only): {dashboard}")
    if plan.blocks:
        where = f"http://127.0.0.1:{plan.port}/v1" if plan.port else "see blocktrain fleet status"
        say(f"gateway: {where}, as soon as every block has a first version")
    say("machines outside of the cluster join with:")
    print(f"blocktrain worker '{invite}'", flush=True)


@fleet.command(cls=Command, epilog="Example:  blocktrain fleet status --json")
def status(
    ray: RayAddress = "auto",
    name: FleetName = "fleet",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of a table.")] = False,
) -> None:
    """Show what each member of a fleet does, and where."""
    from blocktrain.fleet.cluster import joined

    with joined(ray, namespace_of(name)):
        from blocktrain.fleet import fleet as on_ray

        facts = on_ray.status(name)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    show_table(["member", "machine", "state", "starts", "address or reason"], [_row(each) for each in facts["members"]])
    show_line(f"dashboard (read-only): {facts['dashboard'] or 'the coordinator does not answer yet'}")
    show_line(f"gateway: {facts['gateway'] or 'none'}")


def _row(facts: dict[str, Any]) -> list[str]:
    detail = facts["address"] or wrapped(visible(facts["note"]))
    return [facts["name"], facts["node"] or "", facts["state"], str(facts["starts"]), detail]


@fleet.command(cls=Command, epilog="Example:  blocktrain fleet scale --workers 16")
def scale(
    workers: Annotated[int, typer.Option(metavar="N", help="The new number of workers.")],
    ray: RayAddress = "auto",
    name: FleetName = "fleet",
    grace: Grace = 300.0,
) -> None:
    """Change the number of workers.

    Surplus workers submit their work and stop."""
    if workers < 0:
        raise ConfigError(f"--workers {workers} is too small: give 0 or more")
    require_above_zero("--grace", grace)
    from blocktrain.fleet.cluster import joined

    with joined(ray, namespace_of(name)):
        from blocktrain.fleet import fleet as on_ray

        on_ray.scale(name, workers, grace, say)
    print(f"workers: {workers}")


@fleet.command(cls=Command, epilog="Example:  blocktrain fleet down")
def down(ray: RayAddress = "auto", name: FleetName = "fleet", grace: Grace = 300.0) -> None:
    """Stop a fleet; its run stays where the coordinator keeps it.

    Workers submit their work first. A Ray cluster that fleet up started ends, too."""
    require_above_zero("--grace", grace)
    from blocktrain.fleet.cluster import end, joined

    with joined(ray, namespace_of(name)):
        from blocktrain.fleet import fleet as on_ray

        on_ray.require_members(name)
        plan = on_ray.down(name, grace, say)
        started = plan.ray_process if plan and plan.node == on_ray.own_address() else None
    if started is not None:
        end(started)
    print(f"fleet {name} is down" + (f"; its run is in {plan.store.ledger or plan.folder}" if plan else ""))


def _worker_bytes(spec: RunSpec) -> int:
    from blocktrain.train.memory_estimate import training_memory_bytes

    return PROCESS_BYTES + max(training_memory_bytes(spec, phase) for phase in spec.phases)


def _stage_shares(spec: RunSpec, stages: int) -> tuple[tuple[str, ...], int]:
    """The blocks of each stage, and the memory of the largest: a stage holds two versions, and its KV caches."""
    if stages == 0:
        return (), 0
    from blocktrain.cli.shared.stage_processes import split_blocks
    from blocktrain.model.block import block_shapes
    from blocktrain.train.memory_estimate import FLOAT_BYTES

    shares = split_blocks(spec.model.blocks, stages)
    sizes = [sum(prod(shape) for block in share for shape in block_shapes(spec, block).values()) for share in shares]
    names = tuple(f"{share[0]}-{share[-1]}" for share in shares)
    return names, PROCESS_BYTES + 2 * FLOAT_BYTES * max(sizes) + STAGE_CACHE_BYTES
