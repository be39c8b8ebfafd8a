"""blocktrain doctor: checks this machine and the connection to a coordinator, and estimates what the machine could do.
It changes nothing on either side. Next: doctor_checks.py, the verdicts; swarm/worker/capacity.py, the estimates."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.commands.swarm import doctor_checks as checks
from blocktrain.cli.commands.swarm.doctor_checks import Check
from blocktrain.cli.console import duration, quantity, say, show_line, show_table, wrapped
from blocktrain.cli.machine import chosen_memory
from blocktrain.cli.options import INVITE_VARIABLE, MemorySize, before_its_text, read_secret
from blocktrain.errors import BlockTrainError, RequestRefused
from blocktrain.io.private import cache_home
from blocktrain.logs import visible
from blocktrain.presets import PRESETS
from blocktrain.spec import RunSpec, preset
from blocktrain.wire.invite import Invite, read_invite
from blocktrain.wire.messages import INDEX_BLOB, PROTOCOL_VERSION

if TYPE_CHECKING:
    from blocktrain.swarm.worker.capacity import PhasePlan
    from blocktrain.swarm.worker.probe import ProbeClient

EXIT_FAILED = 1
CONNECT_S = 10.0
COMMON_BYTES = 8_000_000_000  # the memory of a common machine
AT_THE_COORDINATOR = ("DNS", "reachable", "TLS", "clock", "access token", "protocol", "role", "download", "upload")


@dataclass
class Findings:
    """The results so far, and the facts of the run that later checks need."""

    checks: list[Check] = field(default_factory=list)
    spec: RunSpec | None = None
    limits_s: dict[int, float] = field(default_factory=dict)  # of the phases with open rounds
    rates: dict[str, float] = field(default_factory=dict)  # bytes per second of "download" and "upload"
    text: bytes = b""
    room_bytes: int | None = None  # disk space that the run takes
    memory_bytes: int = 0  # to use

    def add(self, check: Check) -> bool:
        """Returns whether to continue."""
        self.checks.append(check)
        return check.level != "fail"

    @property
    def failed(self) -> bool:
        return any(check.level == "fail" for check in self.checks)


def doctor(
    invite: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE",
            help="Also check the run of this invite: bt://…#… in quotes, @FILE or - for stdin.",
            envvar=INVITE_VARIABLE,
            callback=read_secret,
        ),
    ] = None,
    preset_name: Annotated[
        str, typer.Option("--preset", metavar="NAME", help=f"Without an invite, estimate for: {', '.join(PRESETS)}.")
    ] = "small",
    home: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The --home of blocktrain worker, if it has one.")
    ] = None,
    memory: MemorySize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of lines.")] = False,
) -> None:
    """Check this machine and the connection to a coordinator.

    Prints what is wrong, how to fix it, and how much this machine could train. It changes nothing, here or at the
    coordinator. Warnings do not stop a worker; a failed check does."""
    address = read_invite(invite) if invite else None
    spec = before_its_text(preset(preset_name))
    findings = Findings()
    torch_works = _examine_software(findings)
    if address:
        _examine_coordinator(findings, _best_place(findings, address))
    if torch_works:
        _examine_machine(findings, home or cache_home(), memory)
    plans = _plans(findings, findings.spec or spec) if torch_works and not findings.failed else []
    if plans:
        fitting = [each for each in plans if each.fits]
        findings.add(checks.blocks_check([each.blocks for each in fitting], len(plans)))
        if fitting:
            findings.add(checks.speed_check([each.steps_per_lease for each in fitting], fitting[0].limit_s))
    if as_json:
        print(json.dumps(_document(findings, plans, address is not None), indent=2))
    else:
        _show(findings, plans, findings.spec or spec, address is not None)
    if findings.failed:
        raise typer.Exit(EXIT_FAILED)


# This machine


def _examine_software(findings: Findings) -> bool:
    """Returns whether torch can be imported."""
    findings.add(checks.python_check(sys.version_info[:3]))
    try:
        import torch

        found = str(torch.__version__)
    except (ImportError, OSError):
        found = None
    return findings.add(checks.torch_check(found))


def _examine_machine(findings: Findings, home: Path, memory: str | None) -> None:
    """Uses the free memory, unless the user says how much."""
    import torch

    from blocktrain.train.trainer import pick_device

    device = pick_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    findings.add(Check("device", "ok", f"{device.type} ({name}), threads: {torch.get_num_threads()}"))
    findings.memory_bytes = chosen_memory(memory, device)
    findings.add(checks.memory_check(findings.memory_bytes))
    findings.add(checks.disk_check(str(home), _free_disk_bytes(home), findings.room_bytes))


def _free_disk_bytes(folder: Path) -> int | None:
    """Free space where the folder is, or would be created."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free if os.access(there, os.W_OK | os.X_OK) and there.is_dir() else None


# The coordinator


def _best_place(findings: Findings, invite: Invite) -> Invite:
    """Of an invite with several addresses, each is tried. The first that answers is examined further: a worker also
    goes on with the next one that answers."""
    places, runs = invite.places, dict[Invite, str]()
    for place in places if len(places) > 1 else ():
        try:
            runs[place] = _run_at(place)
            why = ""
        except (BlockTrainError, OSError) as error:
            why = str(error)
        same = len(set(runs.values())) <= 1
        findings.add(checks.place_check(f"{place.host}:{place.port}", why, same, len(runs) > 0))
    return next(iter(runs), places[0])


def _run_at(place: Invite) -> str:
    from blocktrain.swarm.worker.probe import ProbeClient

    socket.create_connection((place.host, place.port), timeout=CONNECT_S).close()  # a client would wait longer
    with ProbeClient(place, patience_s=0.0) as client:
        return client.run_info().run


def _examine_coordinator(findings: Findings, invite: Invite) -> None:
    """Step by step. The first failure ends it, because later steps need the earlier ones."""
    if not findings.add(_look_up(invite)) or not findings.add(_connect(invite)):
        return
    from blocktrain.swarm.worker.probe import ProbeClient

    try:
        with ProbeClient(invite, patience_s=0.0) as client:
            for step in (_shake_hands, _use_access_token, _measure_line):
                if not step(findings, client):
                    return
    except BlockTrainError as error:
        findings.add(_failed("TLS" if invite.tls and "TLS" not in _names(findings) else "reachable", error))


def _look_up(invite: Invite) -> Check:
    try:
        found = socket.getaddrinfo(invite.host, invite.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return checks.dns_check(invite.host, (), error.strerror or str(error))
    return checks.dns_check(invite.host, sorted({str(each[4][0]) for each in found}))


def _connect(invite: Invite) -> Check:
    where, started_s = f"{invite.host}:{invite.port}", time.perf_counter()
    try:
        socket.create_connection((invite.host, invite.port), timeout=CONNECT_S).close()
    except OSError as error:
        return checks.reach_check(where, None, error.strerror or str(error))
    return checks.reach_check(where, time.perf_counter() - started_s)


def _shake_hands(findings: Findings, client: ProbeClient) -> bool:
    """Checks TLS, that a coordinator answers, and its clock. Needs no access token."""
    there_s = client.clock_s()
    invite = client.invite
    findings.add(checks.tls_check(invite.host, invite.tls, invite.fingerprint is not None))
    return findings.add(checks.clock_check(time.time(), there_s))


def _use_access_token(findings: Findings, client: ProbeClient) -> bool:
    try:
        info, manifest, status = client.run_info(), client.manifest(), client.status()
    except RequestRefused as refused:
        return findings.add(_failed(refused.code if refused.code in AT_THE_COORDINATOR else "access token", refused))
    findings.add(Check("access token", "ok", "valid"))
    if not findings.add(checks.protocol_check(PROTOCOL_VERSION, info.protocol)):
        return False
    findings.spec = RunSpec.model_validate(info.spec)
    findings.limits_s = _limits_s(status)
    train = info.corpus["train/0" if INDEX_BLOB in info.corpus else "train"]
    blobs = (*info.corpus.values(), *(each.tensors for each in manifest.blocks))
    findings.room_bytes = 2 * sum(blob.num_bytes for blob in blobs)  # older versions stay for a while
    findings.rates["download"], findings.text = client.download_rate(train)
    return findings.add(checks.role_check(client.may_work()))


def _measure_line(findings: Findings, client: ProbeClient) -> bool:
    from blocktrain.swarm.worker.capacity import round_bytes

    assert findings.spec is not None
    spec = findings.spec
    upload_rate = client.upload_rate()
    down, up = (max(sizes) for sizes in zip(*(round_bytes(spec, phase) for phase in spec.phases), strict=True))
    limit_s = min(findings.limits_s.values(), default=spec.swarm.deadline_ceiling_s)
    go_on = findings.add(checks.rate_check("download", findings.rates["download"], down, limit_s))
    if upload_rate is None:
        return go_on
    findings.rates["upload"] = upload_rate
    return findings.add(checks.rate_check("upload", upload_rate, up, limit_s))


def _limits_s(status: dict[str, Any]) -> dict[int, float]:
    """How much time the open rounds give their workers."""
    found = {}
    for phase in status["phases"]:
        leases = (phase["round"] or {}).get("leases", ())
        if leases:
            found[int(phase["phase"])] = max(lease["deadline_at_s"] - lease["granted_s"] for lease in leases)
    return found


def _failed(name: str, error: BlockTrainError) -> Check:
    """An error ends with its remedy, after the last colon."""
    found, _, remedy = str(error).rpartition(": ")
    return Check(name, "fail", found, remedy)


def _names(findings: Findings) -> set[str]:
    return {check.name for check in findings.checks}


# What this machine could do


def _plans(findings: Findings, spec: RunSpec) -> list[PhasePlan]:
    from blocktrain.swarm.worker.capacity import TransferRates, measure_speeds, plan
    from blocktrain.train.trainer import pick_device

    say(f"measuring some training steps of {spec.name}: a large model takes a minute")
    rates = TransferRates(findings.rates.get("download"), findings.rates.get("upload"))
    speeds = measure_speeds(spec, findings.memory_bytes, findings.text, pick_device())
    return plan(spec, findings.memory_bytes, speeds, rates, findings.limits_s)


def _document(findings: Findings, plans: Sequence[PhasePlan], asked: bool) -> dict[str, Any]:
    return {
        "ready": not findings.failed,
        "checks": [asdict(check) for check in findings.checks],
        "not_tried": _not_tried(findings) if asked else [],
        "bytes_per_s": findings.rates,
        "phases": [asdict(each) for each in plans],
    }


def _not_tried(findings: Findings) -> list[str]:
    return [name for name in AT_THE_COORDINATOR if name not in _names(findings)]


def _show(findings: Findings, plans: Sequence[PhasePlan], spec: RunSpec, asked: bool) -> None:
    width = max(len(check.name) for check in findings.checks)
    for check in findings.checks:
        print(wrapped(visible(f"{check.level:<4}  {check.name:<{width}}  {check.found}"), width + 8))
        if check.remedy:
            print(wrapped(visible(f"{'':<{width + 8}}→ {check.remedy}"), width + 10))
    if asked and (left_out := _not_tried(findings)):
        say(f"not checked after that: {', '.join(left_out)}")
    if plans:
        print()
        show_line(f"what this machine could do for {'the run' if asked else 'a run'} {spec.name} in a day:")
        show_table(PLAN_COLUMNS, [_plan_row(each) for each in plans])
        for line in _ways_to_fit(spec, findings.memory_bytes):
            print(wrapped(line))
        note = "steps/s is estimated from a few measured steps, not compiled; traffic is an upper limit"
        say(note)


def _ways_to_fit(spec: RunSpec, memory_bytes: int) -> list[str]:
    """How the largest phase is trained with the memory here, and with that of a common machine, if it needs more."""
    from blocktrain.cli.shared.training import ways_of
    from blocktrain.train.memory_estimate import memory_plan, training_memory_bytes

    phase = max(spec.phases, key=lambda each: training_memory_bytes(spec, each))
    whole = training_memory_bytes(spec, phase)
    lines = []
    for limit_bytes in sorted({memory_bytes, COMMON_BYTES}):
        plan = memory_plan(spec, phase, limit_bytes)
        if plan.memory_bytes <= limit_bytes < whole:
            lines.append(
                f"phase {phase.index + 1} needs {quantity(whole, 'B')} as it is; in {quantity(limit_bytes, 'B')} it "
                f"trains with {ways_of(spec, plan)}"
            )
    return lines


PLAN_COLUMNS = ["phase", "blocks", "memory", "fits", "steps/s", "deadline", "steps", "down/day", "up/day"]


def _plan_row(each: PhasePlan) -> list[str]:
    cells = [str(each.phase + 1), "+".join(map(str, each.blocks)), quantity(each.memory_bytes, "B")]
    if not each.fits:
        return [*cells, "no", "", "", "", "", ""]
    work = [f"{each.steps_per_s:.3g}", duration(each.limit_s), str(each.steps_per_lease)]
    traffic = [quantity(each.down_bytes_a_day, "B"), quantity(each.up_bytes_a_day, "B")]
    return [*cells, "by block" if each.streamed else "yes", *work, *traffic]
