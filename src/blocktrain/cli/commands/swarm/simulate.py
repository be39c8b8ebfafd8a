"""blocktrain simulate: how a swarm would do, before it is started. Next: sim/plan.py, which plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.console import say, show_line, show_table
from blocktrain.cli.options import Changes, Preset, Toml, before_its_text, read_spec
from blocktrain.errors import ConfigError

NumWorkers = Annotated[int, typer.Option(metavar="N", help="Number of workers.")]
Churn = Annotated[float, typer.Option(metavar="SHARE", help="Share of the workers that leave per hour.")]
Liars = Annotated[
    float, typer.Option(metavar="SHARE", help="Share of the workers whose leases give no accepted update.")
]
StepsPerSecond = Annotated[float, typer.Option(metavar="X", help="Steps per second of the median worker.")]
Spread = Annotated[float, typer.Option(metavar="X", help="Standard deviation of the logarithm of the speeds.")]
DownMbit = Annotated[float, typer.Option(metavar="X", help="Download of a worker in Mbit/s.")]
UpMbit = Annotated[float, typer.Option(metavar="X", help="Upload of a worker in Mbit/s.")]
NumRounds = Annotated[
    int | None,
    typer.Option(metavar="N", help="Rounds of each phase to simulate. Default: 20; fewer above 3,000 workers."),
]
PriceHour = Annotated[float, typer.Option(metavar="X", help="Price of a node per hour.")]
PriceGb = Annotated[float, typer.Option(metavar="X", help="Price of a gigabyte of traffic.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Random seed.")]
PlotFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with figures.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document instead of tables.")]


def simulate(
    toml: Toml = None,
    preset: Preset = None,
    changes: Changes = None,
    workers: NumWorkers = 100,
    churn: Churn = 0.0,
    liars: Liars = 0.0,
    steps_per_s: StepsPerSecond = 1.0,
    spread: Spread = 0.3,
    down_mbit: DownMbit = 100.0,
    up_mbit: UpMbit = 20.0,
    rounds: NumRounds = None,
    price_hour: PriceHour = 0.0,
    price_gb: PriceGb = 0.0,
    seed: Seed = 0,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Plan a swarm: rounds per hour, goodput, bytes, deadlines.

    The real policy decides, in virtual time; nothing is trained and no network is used."""
    spec = before_its_text(read_spec(toml, preset, None, None, changes))
    for option, price in (("--price-hour", price_hour), ("--price-gb", price_gb)):
        if not 0 <= price < float("inf"):
            raise ConfigError(f"{option} {price:g} is not a price: give 0 or more")

    from blocktrain.sim.plan import Conditions, usual_rounds
    from blocktrain.sim.plan_report import Prices, report_of, rows_of

    conditions = Conditions(
        workers=workers,
        churn=churn,
        liars=liars,
        steps_per_s=steps_per_s,
        spread=spread,
        download_mbit=down_mbit,
        upload_mbit=up_mbit,
        rounds=usual_rounds(workers) if rounds is None else rounds,
        seed=seed,
    )
    found = report_of(spec, conditions, Prices(price_hour, price_gb), say)
    if plot is not None:
        from blocktrain.figures import write_page

        write_page(plot, f"A plan for {workers:,} workers", found.sections())
        say(f"{plot} is written")
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
        return
    for name, text in found.summary():
        show_line(f"{name:22} {text}")
    few = found.by_churn[0][1].conditions.workers
    columns = ("rounds/h", "goodput", "busy", "steps/h")
    print(f"\nfailures, with {few:,} workers")
    show_table(("churn", *columns), rows_of(found.by_churn))
    print(f"\nsettings of [swarm], with {few:,} workers")
    show_table(("setting", *columns), rows_of(found.by_setting))
