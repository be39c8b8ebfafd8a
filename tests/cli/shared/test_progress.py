"""Progress of training and of a swarm: lines without a terminal, bars on one."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.progress import Progress, TextColumn

from blocktrain.cli.shared.progress import LINE_EVERY_S, Bars, RunPlan, swarm_progress, training_progress
from blocktrain.train.trainer import StepReport


def test_lines_show_the_first_and_last_step_and_some_between(capsys):
    now_s = 0.0
    with training_progress({0: "phase 1 of 1"}, clock=lambda: now_s) as show:
        for step in range(1, 31):
            now_s += LINE_EVERY_S / 10
            show(StepReport(0, step, 30, loss=2.5, grad_norm=1.0, lr_factor=1.0, step_bytes=1000, seconds=1.0))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in said] == [f"phase 1 of 1: step {step}/30" for step in (1, 11, 21, 30)]
    assert said[1].endswith("loss 2.500 nats/byte, 1 kB/s, 19s left")


def swarm_status(step: int) -> dict:
    return {"phases": [{"phase": 0, "step": step, "steps": 6}], "workers": [{"updates": 1}, {"updates": 2}]}


def test_a_swarm_s_line_has_the_held_out_loss_and_is_not_repeated(capsys):
    untrained, trained = {"held_out": []}, {"held_out": [{"nats_per_byte": 2.0}]}
    with swarm_progress({0: "phase 1 of 1"}) as show:
        for curves in (untrained, untrained, trained):
            show(swarm_status(0), curves)
        show(swarm_status(6), trained)
    assert capsys.readouterr().err.splitlines() == [
        "phase 1 of 1: step 0/6, held-out loss 5.545 nats/byte, 2 workers, 3 updates",
        "phase 1 of 1: step 6/6, held-out loss 2.000 nats/byte, 2 workers, 3 updates",
    ]


def test_a_bar_waits_until_its_phase_starts():
    with Progress(TextColumn("{task.fields[facts]}"), console=Console(file=StringIO())) as progress:
        bars = Bars({0: "phase 1 of 2", 1: "phase 2 of 2"}, progress)
        bars.show(0, 4, 6, ["loss 2.500 nats/byte"])
        first, second = progress.tasks
    assert (first.started, first.completed, first.total) == (True, 4, 6)
    assert first.fields["facts"] == "4/6  loss 2.500 nats/byte"
    assert (second.started, second.fields["facts"]) == (False, "waiting")


def test_the_time_of_the_whole_run_counts_phases_that_have_not_begun(capsys):
    plan = RunPlan({0: (10, 1.0), 1: (10, 3.0)})
    with training_progress({0: "phase 1 of 2", 1: "phase 2 of 2"}, plan) as show:
        show(StepReport(0, 4, 10, loss=2.5, grad_norm=1.0, lr_factor=1.0, step_bytes=1000, seconds=2.0))
        show(StepReport(1, 10, 10, loss=2.5, grad_norm=1.0, lr_factor=1.0, step_bytes=1000, seconds=6.0))
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("12s left, 1m12s for the whole run")  # 6 steps of 2 s, 10 of three times the work
    assert last.endswith("0s left, 12s for the whole run")


def test_a_swarm_s_line_has_the_time_that_is_left(capsys):
    with swarm_progress({0: "phase 1 of 1"}) as show:
        show({**swarm_status(0), "time_left_s": 75.0}, {"held_out": []})
    assert capsys.readouterr().err.endswith("2 workers, 3 updates, 1m15s left\n")


def test_a_swarm_s_new_samples_are_shown_once_each(capsys):
    written = [
        {"at_s": at_s, "nats_per_byte": 2.5, "samples": [{"prompt": "The ", "text": "\x1b[2Jx"}]} for at_s in (1, 2)
    ]
    with swarm_progress({0: "phase 1 of 1"}) as show:
        for samples in (written[:1], written):
            show({**swarm_status(0), "samples": samples}, {"held_out": []})
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("2.500")] == ["2.500  The |\\x1b[2Jx"] * 2
