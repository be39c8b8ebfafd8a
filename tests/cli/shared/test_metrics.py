"""Progress for other tools: TensorBoard logs, JSON lines and Prometheus counters."""

from __future__ import annotations

import json
import socket
import sys
import urllib.request

import pytest

from blocktrain.cli.shared.metrics import WorkCounters, metrics_file, metrics_server, report_to
from blocktrain.errors import ConfigError, StorageError
from blocktrain.spec import preset
from blocktrain.swarm.local import local_swarm
from blocktrain.swarm.worker.worker import WorkReport

STEP = WorkReport("step", "step 1", 2.5)


def test_tensorboard_sees_every_step_of_every_phase(run, tiny, tmp_path):
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs the extra: pip install 'blocktrain[tensorboard]'",
    )
    assert run("train", *tiny, "--tensorboard", tmp_path / "logs").exit_code == 0
    logs = reading.EventAccumulator(str(tmp_path / "logs")).Reload()
    losses = {tag: [x.value for x in logs.Scalars(tag)] for tag in logs.Tags()["scalars"] if tag.endswith("loss")}
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for phase in range(3):
        expected = [record["loss"] for record in records if record.get("phase") == phase]
        assert losses[f"phase {phase + 1}/loss"] == pytest.approx(expected)


def test_reports_become_json_lines_that_are_appended(tmp_path):
    for now_s in (1.0, 2.0):
        with metrics_file(tmp_path / "m.jsonl", clock=lambda: now_s) as log:  # noqa: B023
            log(STEP)
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert records == [{"at_s": at_s, "kind": "step", "text": "step 1", "loss": 2.5} for at_s in (1.0, 2.0)]


def test_prometheus_reads_counters_on_this_machine_while_the_worker_runs(capsys):
    with metrics_server(0) as counters:
        for report in (STEP, STEP, WorkReport("submitted", "2 steps", 2.0)):
            counters(report)
        url = capsys.readouterr().err.split()[-1]
        with urllib.request.urlopen(url) as answer:
            page = answer.read().decode()
    assert 'blocktrain_worker_reports_total{kind="step"} 2.0' in page
    assert 'blocktrain_worker_reports_total{kind="submitted"} 1.0' in page
    assert "blocktrain_worker_loss_nats_per_byte 2.5" in page
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


def test_without_options_there_is_no_listener():
    with metrics_server(None) as counters, metrics_file(None) as log:
        assert (counters, log) == (None, None)


def test_every_listener_gets_the_report():
    heard = []
    report_to(heard.append, None, heard.append)(STEP)
    assert heard == [STEP, STEP]


def test_a_worker_writes_its_metrics(run, text, tmp_path):
    spec = preset("tiny").with_(**{"corpus.source": str(text), "train.steps": 2, "swarm.round_steps": 2})
    with local_swarm(spec, workers=0) as swarm:
        options = ["--metrics", tmp_path / "m.jsonl", "--metrics-port", 0, "--home", tmp_path / "home"]
        result = run("worker", swarm.invite, *options)
    assert result.exit_code == 0, result.stderr
    assert "metrics: http://127.0.0.1:" in result.stderr
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert kinds[:4] == ["lease", "step", "step", "submitted"]
    assert kinds[-1] == "finished"


def test_a_file_or_port_that_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="choose another --metrics"), metrics_file(tmp_path / "no" / "m.jsonl"):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="give another port, or 0"), metrics_server(port):
            pass


def test_workers_in_one_process_count_for_themselves():
    first, second = WorkCounters(), WorkCounters()
    first(STEP)
    assert second.registry.get_sample_value("blocktrain_worker_reports_total", {"kind": "step"}) is None


def test_without_tensorboard_the_remedy_is_to_install_it(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = run("train", *tiny, "--tensorboard", tmp_path / "logs")
    assert result.exit_code == 2
    assert "pip install 'blocktrain[tensorboard]'" in result.stderr
