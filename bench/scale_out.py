"""What do several coordinators on one database and one bucket take and give? Real coordinator processes on a real
PostgreSQL and a real S3 server; hundreds of connections ask for leases and submit one small update each, divided among
the coordinators. Beside the rates, which depend on the machine, everything that does not is counted on the way: SQL
statements in PostgreSQL's log, rows in its tables, requests and bytes in a proxy before the bucket.

    python bench/scale_out.py [--clients 200,2000] [--seconds 10] [--busy] [--more]

Each row is written to the result file when it is measured. `--busy` says that other work ran beside it: the page then
shows counts and CPU ratios, and no rates."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from sqlalchemy import create_engine, make_url, text

from blocktrain.spec import RunSpec, preset
from blocktrain.swarm.ledger.ledger import Ledger
from shared.experiment import (
    RESULTS,
    Document,
    Verdict,
    goal_lines,
    machine,
    markdown,
    portable,
    read_json,
    table,
    write_json,
)
from swarms.counting_proxy import CountingProxy
from swarms.load import driven, load_row
from swarms.processes import CoordinatorProcess, run_id, running_coordinator

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the servers that tests use
import services  # type: ignore[import-not-found]

STATEMENT = re.compile(rb"LOG:  (?:statement|execute[^:\n]*): ([A-Za-z]+)")
WRITING = ("INSERT", "UPDATE", "DELETE")
IDLE_S = 5.0
WORKS = ("leases", "updates")
REQUESTS = {"updates": 2, "updates in parts": 4}  # for one update, with its lease
WAYS = {"updates": "in one request", "updates in parts": "in parts"}
MOST_WRITES = 10  # statements that write, for one update: the goal


@dataclass(frozen=True)
class Case:
    coordinators: int
    clients: int


# --- the servers -----------------------------------------------------------------------------------------------------


@contextmanager
def servers() -> Iterator[CountingProxy]:
    """PostgreSQL and the bucket, in their own processes, as long as the block lasts. The bucket is behind a proxy."""
    own = services.SHARED not in os.environ
    if own:
        shared = Path(tempfile.mkdtemp(prefix="blocktrain-bench-", suffix=f"-{os.getpid()}"))
        shared.chmod(0o755)  # PostgreSQL runs as another user if this is root
        os.environ[services.SHARED] = str(shared)
    before = dict(os.environ)
    try:
        with closing(CountingProxy(int(services.service("s3")["port"]))) as proxy:
            os.environ.update(services.bucket_environment(), AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.port}")
            yield proxy
    finally:
        os.environ.clear()
        os.environ.update(before)
        if own:
            services.end_services(Path(os.environ.pop(services.SHARED)))


@contextmanager
def coordinators(spec: RunSpec, number: int, folder: Path) -> Iterator[tuple[list[CoordinatorProcess], str]]:
    """So many of one new run, and the URL of its ledger."""
    ledger = f"{services.service('postgres')['url']}?schema=bench_{uuid.uuid4().hex}"
    blobs = f"s3://{services.BUCKET}/{uuid.uuid4().hex}"
    options = ["--ledger", ledger, "--blobs", blobs, "--rate", "1000000"]
    options += ["--max-connections", "4096", "--max-per-address", "4096"]
    with ExitStack() as stack:
        made = [stack.enter_context(running_coordinator(spec, folder / str(i), options=options)) for i in range(number)]
        yield made, ledger


# --- what is measured ------------------------------------------------------------------------------------------------


def spec_for(clients: int) -> RunSpec:
    """A run whose round waits for all of them."""
    return preset("tiny").with_(
        **{
            "swarm.min_updates": clients,
            "swarm.keys_per_token": 2 * clients,
            "swarm.deadline_floor_s": 600.0,
            "swarm.evaluate_every": 1000,
            "swarm.averaging": "mean",  # random updates point everywhere
        }
    )


def measured(case: Case, seconds: float, folder: Path) -> dict[str, Any]:
    spec = spec_for(case.clients)
    with coordinators(spec, case.coordinators, folder) as (processes, ledger):
        seen = _driven(spec, processes, case.clients, seconds, WORKS)
        merged = _merged(ledger, case.clients)
    return {"coordinators": case.coordinators, "clients": case.clients, "merged_updates": merged, "rows": seen}


def counted(case: Case, work: str, proxy: CountingProxy, folder: Path) -> dict[str, Any]:
    """One round of so many updates, which come as small or as large ones do, with every statement in PostgreSQL's log.
    Nothing is timed."""
    spec = spec_for(case.clients)
    with coordinators(spec, case.coordinators, folder) as (processes, ledger), _logging_statements() as log:
        log_before, began_s = log.stat().st_size, time.monotonic()
        time.sleep(IDLE_S)
        idle_per_s = _statements(log, log_before).total() / (time.monotonic() - began_s)
        proxy_before, rows_before = proxy.read(), _rows(ledger)
        log_before, began_s = log.stat().st_size, time.monotonic()
        [row] = _driven(spec, processes, case.clients, 0.0, (work,))
        statements, window_s = _statements(log, log_before), time.monotonic() - began_s
        merged = _merged(ledger, case.clients)
        bucket, added = proxy.read(), _rows(ledger) - rows_before
    return {
        "coordinators": case.coordinators,
        "clients": case.clients,
        "work": work,
        "merged_updates": merged,
        "requests": REQUESTS[work] * case.clients,
        "payload_bytes": row["payload_bytes"],
        "statements": max(0, round(statements.total() - idle_per_s * window_s)),
        "writing_statements": sum(statements[word] for word in WRITING),
        "idle_statements_per_s": idle_per_s,
        "rows": sum(added.values()),
        "rows_of_tables": dict(sorted(added.items())),
        "bucket_requests": dict(bucket.requests - proxy_before.requests),
        "bucket_bytes_in": bucket.bytes_in - proxy_before.bytes_in,
        "bucket_bytes_out": bucket.bytes_out - proxy_before.bytes_out,
    }


def _driven(
    spec: RunSpec, processes: Sequence[CoordinatorProcess], clients: int, seconds: float, works: Sequence[str]
) -> list[dict[str, Any]]:
    """The clients, divided among the coordinators, each share from a process of its own."""
    shares = [clients // len(processes) + (i < clients % len(processes)) for i in range(len(processes))]
    common = {
        "works": works,
        "spec": spec.model_dump(mode="json"),
        "seconds": seconds,
        "run": run_id(processes[0].invite),
    }
    settings = [
        {**common, "invite": str(process.invite), "server_pid": process.pid, "clients": share}
        for process, share in zip(processes, shares, strict=True)
    ]
    with ThreadPoolExecutor(len(processes)) as pool:
        seen = list(pool.map(driven, settings))
    return [load_row(work, together([of_server[work] for of_server in seen])) for work in works]


def together(seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several servers did at the same time, as if by one."""
    return {
        "latencies_s": [latency for each in seen for latency in each["latencies_s"]],
        "seconds": max(each["seconds"] for each in seen),
        "server_cpu_s": sum(each["server_cpu_s"] for each in seen),
        "payload_bytes": seen[0].get("payload_bytes"),
    }


def _merged(ledger_url: str, clients: int, patience_s: float = 900.0) -> int:
    """The updates that went into the version, when the round is merged."""
    give_up_s = time.monotonic() + patience_s
    with closing(Ledger(ledger_url)) as ledger:
        while not (record := ledger.rounds(0, 100))[0].closed_s and time.monotonic() < give_up_s:
            time.sleep(0.1)
        updates: list[Any] = []
        while page := ledger.contributions(updates[-1].update.number if updates else 0):
            updates += page
    assert record[0].closed_s, f"the round of {clients} updates was not merged in {patience_s:g} s"
    return len({each.update.id for each in updates if each.update.merged_round == 0})


@contextmanager
def _logging_statements() -> Iterator[Path]:
    facts = services.service("postgres")
    engine = create_engine(make_url(facts["url"]).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")

    def set_to(value: str) -> None:
        with engine.connect() as connection:
            connection.execute(text(f"ALTER SYSTEM SET log_statement = '{value}'"))
            connection.execute(text("SELECT pg_reload_conf()"))
        time.sleep(1.0)  # the server's processes read it when they are told to

    try:
        set_to("all")
        yield Path(os.environ[services.SHARED]) / "postgres" / services.LOG
    finally:
        set_to("none")
        engine.dispose()


def _statements(log: Path, after: int) -> Counter[str]:
    """By their first word, in what was written after that byte."""
    return Counter(word.decode().upper() for word in STATEMENT.findall(log.read_bytes()[after:]))


def _rows(ledger_url: str) -> Counter[str]:
    with closing(Ledger(ledger_url)) as ledger, ledger.database.engine.connect() as connection:
        schema = connection.execute(text("SELECT current_schema()")).scalar_one()
        names = text("SELECT table_name FROM information_schema.tables WHERE table_schema = :schema")
        tables = connection.execute(names, {"schema": schema}).scalars().all()
        counts = {name: connection.execute(text(f'SELECT count(*) FROM "{name}"')).scalar_one() for name in tables}
    return Counter({name: int(number) for name, number in counts.items()})


def _case(rates: Mapping[str, Any]) -> tuple[int, int]:
    """The largest number of clients first."""
    return -rates["clients"], rates["coordinators"]


# --- the document ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    sizes = [] if options.quick else [int(number) for number in options.clients.split(",") if number]
    counted_clients = 4 if options.quick else 20
    path = options.out / "scale_out.json"
    about = {"machine": machine(), "busy": options.busy, "spec": portable(spec_for(counted_clients))}
    document: dict[str, Any] = about | {"counts": [], "rates": []}
    if options.more:
        document |= {part: rows for part, rows in read_json(path).items() if part in ("counts", "rates")}

    def keep(part: str, row: dict[str, Any]) -> None:
        document[part].append(row | {"load": os.getloadavg()[0]})
        newest = {_case(rates): rates for rates in document["rates"]}  # a case that is measured again is replaced
        document["rates"] = [newest[case] for case in sorted(newest)]
        write_json(path, document)

    with servers() as proxy, tempfile.TemporaryDirectory() as name:
        numbers, folder = (1,) if options.quick else (1, 2), Path(name)
        for work in () if options.more else list(WAYS)[:1] if options.quick else WAYS:
            for number in numbers:
                case = Case(number, counted_clients)
                keep("counts", counted(case, work, proxy, folder / f"count-{number}-{work}"))
        for case in (Case(number, size) for size in sizes for number in numbers):
            keep("rates", measured(case, options.seconds, folder / f"{case.coordinators}-{case.clients}"))
    print(table(*_counts_table(document)), table(*_rates_table(document)), sep="\n")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="200,2000", help="numbers of connections, with commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="of asking for leases, in each case")
    parser.add_argument("--busy", action="store_true", help="other work runs beside it: show no rates")
    parser.add_argument("--more", action="store_true", help="adds the rates of these clients to the result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="one coordinator counts the updates of a few clients")
    return parser.parse_args(argv)


def section(document: Document) -> str:
    busy = "Other work ran on the machine at the same time: rates are left out, and CPU times are rough.\n\n"
    intro = (
        "## Several coordinators\n\n"
        "One run of the preset `tiny` on one PostgreSQL and one bucket (SeaweedFS), both on the same machine as the "
        "coordinators and their clients: all of them share its cores. Clients are divided among the coordinators; each "
        "asks for a lease and submits one update; one merge makes a version of all of them. Everything is "
        "counted per update, with the share of the merge in it. Statements that idle coordinators send, which look "
        "for work of others, are subtracted.\n\n"
    )
    load = busy if document["busy"] else ""
    parts = [markdown(*_counts_table(document)), load + markdown(*_rates_table(document))]
    return intro + "\n".join(parts) + "\n" + goal_lines(verdicts(document))


def _counts_table(document: Document) -> tuple[list[str], list[list[str]]]:
    head = [
        "coordinators",
        "updates in the round",
        "an update comes",
        "HTTP requests",
        "SQL statements",
        "of them writing",
        "rows",
    ]
    head += ["bucket requests", "bucket bytes in"]
    return head, [
        [
            str(each["coordinators"]),
            str(each["clients"]),
            WAYS[each["work"]],
            *(
                f"{each[name] / each['clients']:.1f}"
                for name in ("requests", "statements", "writing_statements", "rows")
            ),
            f"{sum(each['bucket_requests'].values()) / each['clients']:.1f}",
            f"{each['bucket_bytes_in'] / each['clients']:,.0f}",
        ]
        for each in document["counts"]
    ]


def _rates_table(document: Document) -> tuple[list[str], list[list[str]]]:
    head = ["coordinators", "clients", "updates merged", "CPU ms per lease", "CPU ms per update"]
    head += [] if document["busy"] else ["leases per s", "updates per s", "lease p99 ms"]
    rows = []
    for case in document["rates"]:
        leases, updates = case["rows"]
        row = [str(case["coordinators"]), str(case["clients"]), str(case["merged_updates"])]
        row += [f"{leases['server_cpu_ms']:.1f}", f"{updates['server_cpu_ms']:.1f}"]
        if not document["busy"]:
            row += [f"{leases['per_s']:.0f}", f"{updates['per_s']:.0f}", f"{leases['p99_ms']:.0f}"]
        rows.append(row)
    return head, rows


def verdicts(document: Document) -> list[Verdict]:
    cases = [*document["counts"], *document["rates"]]
    lost = sum(case["clients"] - case["merged_updates"] for case in cases)
    worst = max(each["writing_statements"] / each["clients"] for each in document["counts"])
    return [
        Verdict("updates that one or two coordinators did not merge exactly once", str(lost), "= 0", lost == 0),
        Verdict("writing SQL statements per update", f"{worst:.1f}", f"≤ {MOST_WRITES}", worst <= MOST_WRITES),
    ]


def figures(document: Document) -> dict[str, go.Figure]:
    return {}


if __name__ == "__main__":
    main()
