"""deploy/: every command parses, every file that one uses is provided, every worker has time to submit its work."""

from __future__ import annotations

import configparser
import copy
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from blocktrain.cli.main import app
from blocktrain.cli.options import INVITE_VARIABLE
from blocktrain.spec import preset

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
README = (DEPLOY / "README.md").read_text()
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
INVITE = "bt://127.0.0.1:7000/#an-access-token"
OBJECTS = [
    (path.name, each)
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text())
]
PODS: dict[str, Any] = {
    each["metadata"]["name"]: each["spec"] for _, each in OBJECTS if each["kind"] in ("Deployment", "StatefulSet")
}
SERVICES = {each["metadata"]["name"]: each["spec"] for _, each in OBJECTS if each["kind"] == "Service"}
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPT = DEPLOY / "slurm" / "worker.sbatch"
GRACE_S = 120


def check(words: list[str]) -> str:
    """Raises where an option is unknown or something is missing. Returns the command's name."""
    given = [INVITE if word.startswith("@") else word for word in words]
    COMMANDS[given[0]].make_context(given[0], given[1:])
    return words[0]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def container(pod: str) -> dict[str, Any]:
    (only,) = PODS[pod]["template"]["spec"]["containers"]
    return only


def test_the_readme_names_every_file():
    files = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*") if path.is_file()} - {"README.md"}
    assert set(re.findall(r"^\| `([^`]+)`", README, re.MULTILINE)) == files


# systemd


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_runs_a_command_as_a_user_without_privileges(path):
    service = unit(path)["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == "/opt/blocktrain/bin/blocktrain"
    assert check(words) in path.name
    assert service["User"] == "blocktrain"
    assert service["ProtectSystem"] == "strict"  # so its files are below the state directory
    folder = option(words, "--dir" if "--dir" in words else "--home")
    assert folder.startswith(f"/var/lib/{service['StateDirectory']}/")
    assert int(service["TimeoutStopSec"]) >= GRACE_S
    assert unit(path)["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_readme_says_where_the_files_of_a_unit_come_from(path):
    for name in re.findall(r"/etc/blocktrain/[\w.]+", path.read_text()):
        assert name in README


def test_a_worker_that_was_stopped_has_not_failed():
    (path,) = [path for path in UNITS if "worker" in path.name]
    assert unit(path)["Service"]["SuccessExitStatus"] == "130"


# Slurm


def test_the_batch_script_asks_for_what_slurm_has():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE))
    known = "job-name ntasks cpus-per-task mem gpus-per-task time signal requeue open-mode output"
    assert sorted(options) == sorted(known.split())
    receiver, number, seconds = re.fullmatch(r"(B):(TERM)@(\d+)", options["signal"]).groups()
    assert (receiver, number) == ("B", "TERM")
    assert int(seconds) >= GRACE_S


def test_the_command_of_the_batch_script_parses():
    (line,) = re.findall(r"^blocktrain (.+) &$", SCRIPT.read_text(), re.MULTILINE)
    assert check([re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in shlex.split(line)]) == "worker"


STAND_INS = {
    # Ends as a worker does: with 130 after a SIGTERM, when it has submitted.
    "blocktrain": "trap 'echo submitted; exit 130' TERM\necho \"$@\"\nexec 3<> <(:)\nread -r _ <&3",
    "scontrol": 'echo "$@"',
}


def test_a_job_whose_time_is_over_hands_in_and_is_queued_again(tmp_path):
    for name, script in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/h"}
    job = subprocess.Popen(["bash", SCRIPT], env=slurm, stdout=subprocess.PIPE, text=True)
    assert "@/h/.config/blocktrain/invite --home /h/.cache/blocktrain/slurm-3" in job.stdout.readline()
    job.terminate()
    assert job.communicate()[0].splitlines() == ["submitted", "requeue 7"]
    assert job.returncode == 130


# SkyPilot


def test_the_task_gets_its_invite_from_the_environment():
    task = yaml.safe_load((DEPLOY / "skypilot" / "worker.yaml").read_text())
    assert set(task) == {"name", "resources", "secrets", "setup", "run"}
    assert set(task["resources"]) == {"accelerators", "use_spot", "disk_size"}
    assert task["secrets"] == {INVITE_VARIABLE: None}
    program, *words = task["run"].removeprefix("exec ").split()
    assert program == "~/blocktrain/bin/blocktrain"
    assert "venv ~/blocktrain\n" in task["setup"]
    assert check([words[0], INVITE, *words[1:]]) == "worker"


# Kubernetes

SCHEMAS = json.loads(Path(__file__).with_name("kubernetes.json").read_text())


def require_schema(object: dict[str, Any]) -> None:
    schema = {**SCHEMAS["kinds"][object["kind"]], "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(object)


@pytest.mark.parametrize("object", [each for _, each in OBJECTS], ids=lambda each: each["metadata"]["name"])
def test_an_object_is_one_that_the_schemas_of_kubernetes_allow(object):
    require_schema(object)


def test_the_schemas_refuse_a_misspelled_key():
    (workers,) = [each for name, each in OBJECTS if name == "workers.yaml"]
    workers = copy.deepcopy(workers)
    workers["spec"]["template"]["spec"]["terminationGracePeriod"] = 120
    with pytest.raises(jsonschema.ValidationError, match="'terminationGracePeriod' was unexpected"):
        require_schema(workers)


@pytest.mark.parametrize("pod", PODS)
def test_the_command_of_a_pod_parses(pod):
    assert check(container(pod)["args"]) in pod


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_mounts_every_file_that_its_command_names(pod):
    spec, only = PODS[pod]["template"]["spec"], container(pod)
    volumes = {each["name"]: each for each in spec["volumes"]}
    claims = {each["metadata"]["name"] for each in PODS[pod].get("volumeClaimTemplates", [])}
    mounted = {each["mountPath"]: each["name"] for each in only["volumeMounts"]}
    assert set(mounted.values()) <= set(volumes) | claims
    for folder, file in re.findall(r"@?(/\w+)(?:/([\w.-]+))?(?=,|$)", ",".join(only["args"])):
        source = volumes.get(mounted[folder], {})
        if file and "secret" in source:
            assert file in {item["path"] for item in source["secret"]["items"]}
        if file and "configMap" in source:
            assert file in config(source["configMap"]["name"])


def config(name: str) -> dict[str, str]:
    (found,) = [each["data"] for _, each in OBJECTS if each["kind"] == "ConfigMap" and each["metadata"]["name"] == name]
    return found


def test_the_readme_makes_the_secret_with_all_its_keys():
    (line,) = re.findall(r"^kubectl create secret generic (.+)$", README, re.MULTILINE)
    name, *options = line.split()
    made = {each.removeprefix("--from-file=") for each in options}
    secrets = [v["secret"] for pod in PODS.values() for v in pod["template"]["spec"]["volumes"] if "secret" in v]
    assert {each["secretName"] for each in secrets} == {name}
    assert {item["key"] for each in secrets for item in each["items"]} == made


def test_selectors_fit_labels_and_services_fit_ports():
    labels = {name: pod["template"]["metadata"]["labels"] for name, pod in PODS.items()}
    for name, pod in PODS.items():
        assert pod["selector"]["matchLabels"] == labels[name]
    for name, service in SERVICES.items():
        assert service["selector"] == labels[name]
        ports = {each["containerPort"] for each in container(name)["ports"]}
        assert {each["targetPort"] for each in service["ports"]} == ports
        assert f":{ports.pop()}" in re.sub(r"--port,", ":", ",".join(container(name)["args"]))


def test_the_stages_hold_every_block_of_the_run_once_and_the_gateway_asks_them():
    settings = tomllib.loads(config("blocktrain-run")["run.toml"])
    blocks = preset(settings["preset"]).model.blocks
    addresses = option(container("blocktrain-gateway")["args"], "--stages").split(",")
    held: list[int] = []
    for address in addresses:
        host, port = re.fullmatch(r"tcp://([\w-]+):(\d+)", address).groups()
        assert int(port) in {each["port"] for each in SERVICES[host]["ports"]}
        first, last = map(int, option(container(host)["args"], "--blocks").split("-"))
        held += range(first, last + 1)
    assert held == list(range(blocks))


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_runs_as_the_user_of_the_image_with_time_to_stop(pod):
    spec = PODS[pod]["template"]["spec"]
    user = int(re.search(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text())[1])
    assert spec["securityContext"] == {"runAsNonRoot": True, "runAsUser": user, "fsGroup": user}
    if pod in ("blocktrain-worker", "blocktrain-coordinator"):
        assert spec["terminationGracePeriodSeconds"] >= GRACE_S


def test_the_coordinator_is_reached_by_the_name_in_its_invite():
    words = container("blocktrain-coordinator")["args"]
    assert option(words, "--public") in SERVICES
    assert "--tls-self-signed" in words
