"""What front processes gain and cost: the same loads with one process, and with several in front of the core.

    python benchmarks/fronts.py [--fronts N ...] [--seconds S] [--rounds N] [--streams N ...] [--only NAME ...]
        [--json FILE] [--phases] [--spread] [--print]

Servers with 1 and with each of N processes (default: 2) run at the same time and are asked in turn, in another order
in every other round. "identity" is a Python model in a worker with dynamic batching, "in the core" the same model in
process; tokens come from a stand-in for vLLM with a step each millisecond.

- processor time, in microseconds a request (or token): of the core, of all fronts together, of workers and other
  processes, and of the client;
- "requests a wake-up": requests divided by the number of times that the core, or the single process, waited and was
  awakened. It is large where messages come while it works;
- "core / single": the processor time of the core in proportion to that of a single process for the same request;
- p50 and p99: of requests at random moments (open loop), "at" so many a second: 70 % of what the same client, that of
  `nerite bench`, gets of the slowest server with 32 at a time, because it takes more processor time than wrk; of tokens
  the time from one to the next, at the full rate.

--phases attributes the processor time to phases (see front_phases.py), --spread compares with SO_REUSEPORT (see
front_spread.py); each alone. --json writes the times for front_model.py. Needs wrk and h2load (Debian: wrk,
nghttp2-client).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import front_phases
import front_spread
from contestants import ASLEEP, Contestant, nerite
from front_loads import FrontLoad, Pace, Times, latencies, loads, repository, write_requests
from loads import need
from page import command_line, machine, publish


class Row(NamedTuple):
    """Medians of a load with a number of front processes."""

    load: str
    fronts: int
    """1 for a single process."""
    pace: Pace
    times: Times


def measured(load: FrontLoad, servers: dict[int, Contestant], seconds: float, rounds: int) -> list[Row]:
    """Run a load on all servers in turn; return the medians."""
    runs: dict[int, list[tuple[Pace, Times]]] = {count: [] for count in servers}
    for number in range(rounds):
        for count in list(servers)[:: 1 if number % 2 else -1]:
            runs[count].append(load.run(servers[count]))
    rows = []
    found = latencies(servers, load.message, seconds) if load.message is not None else {}
    for count in servers:
        pace = Pace(*(statistics.median(values) for values in zip(*(run[0] for run in runs[count]), strict=True)))
        times = Times(*(statistics.median(values) for values in zip(*(run[1] for run in runs[count]), strict=True)))
        if count in found:
            at, p50, p99 = found[count]
            pace = pace._replace(at=at, p50=p50, p99=p99)
        rows.append(Row(load.name, count, pace, times))
    return rows


COLUMNS = [
    *("", "processes", "per second", "ratio", "core", "fronts", "workers", "client", "requests a wake-up"),
    *("core / single", "wanted", "at", "p50", "p99"),
]
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


def lines(load: FrontLoad, rows: Sequence[Row]) -> str:
    """Return the lines of a load; the first row is that of a single process."""
    single = rows[0]
    text = ""
    for row in rows:
        pace, times = row.pace, row.times
        ratio = share = wanted = ""
        batch = f"{1 / times.core_sleeps:.1f}" if times.core_sleeps else ""
        if row is not single:
            ratio = f"**{pace.rate / single.pace.rate:.2f}**"
            share = f"**{times.core / single.times.core:.0%}**"
            wanted = f"{load.target:.0%}" if load.target else ""
        text += f"| {row.load} | {row.fronts} | {pace.rate:,.0f} | {ratio} | {times.core:.1f} us "
        text += (
            f"| {times.fronts:.1f} us | {times.others:.1f} us | {pace.client:.1f} us | {batch} | {share} | {wanted} "
        )
        at = f"{pace.at:,.0f}" if pace.at else ""
        text += f"| {at} | {pace.p50:.2f} ms | {pace.p99:.2f} ms |\n"
    return text


def report(options: argparse.Namespace, folder: Path, models: Path) -> str:
    """Measure all loads; return the table."""
    text = f"Measured on {machine()}; {options.rounds} rounds of {options.seconds:g} s.\n\n{HEAD}"
    found: list[Row] = []
    with ExitStack() as stack:
        servers = {
            count: stack.enter_context(nerite(f"{count}", models, folder, ASLEEP, f"--front-processes={count}"))
            for count in dict.fromkeys((1, *options.fronts))
        }
        for load in loads(folder, options.seconds, options.streams):
            if not options.only or any(part in load.name for part in options.only):
                rows = measured(load, servers, options.seconds, options.rounds)
                found += rows
                text += (made := lines(load, rows))
                print(made, end="", file=sys.stderr, flush=True)
    if options.json:
        rows_json = [{"load": row.load, "processes": row.fronts} | row.pace._asdict() | row.times._asdict()
                     for row in found]  # fmt: skip
        options.json.write_text(json.dumps(rows_json, indent=1))
    return text


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__, 3, 3)
    parser.add_argument("--fronts", type=int, nargs="+", default=[2], help="numbers of front processes (default: 2)")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 200], help="of tokens (default: 8 200)")
    parser.add_argument("--only", nargs="*", default=[], help="loads whose name contains one of these")
    parser.add_argument("--json", type=Path, help="write the figures for front_model.py to this file")
    parser.add_argument("--phases", action="store_true", help="attribute processor time to phases, with py-spy")
    parser.add_argument("--spread", action="store_true", help="compare the spread of load with SO_REUSEPORT")
    options = parser.parse_args()
    need("wrk", "h2load")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_requests(folder)
        models = repository(folder)
        if options.phases:
            publish("front phases", front_phases.report(options, folder, models), options)
        elif options.spread:
            publish("front spread", front_spread.report(options, folder, models), options)
        else:
            publish("fronts", report(options, folder, models), options)


if __name__ == "__main__":
    main()
