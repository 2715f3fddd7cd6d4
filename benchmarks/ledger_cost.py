"""What a ledger costs: small requests with and without one.

    python benchmarks/ledger_cost.py [--seconds S] [--rounds N] [--print]

Each request gets a row in an SQLite file, or is added to one. The servers are asked in turn, and each of them is first
at times. The time is that of the server's process on the processors, the database's thread included and the worker not.
Needs wrk and h2load.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from contestants import ASLEEP, Contestant, identity_repository, nerite
from loads import Load, h2load, need, write_bodies, wrk
from page import bring_up_to_date, machine


class Cost(NamedTuple):
    """What one run showed of a server."""

    rate: float
    """Requests a second."""
    microseconds: float
    """Processor time of the server for one."""


def main() -> None:
    """Run, and write or print the section of docs/benchmarks.md."""
    need("wrk", "h2load")
    bring_up_to_date("ledger", __doc__, report, 2.0)


def report(seconds: float, rounds: int) -> str:
    """Return the table."""
    lines = [
        f"Measured on {machine()}; medians of {rounds} rounds of {seconds:g} s.",
        "",
        "| | requests a second, off | ledger | µs of processor time, off | ledger | added |",
        "|---|---|---|---|---|---|",
    ]
    for place in ("worker", "in process"):
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            folder = Path(temporary)
            write_bodies(folder)
            models = identity_repository(folder, in_process=place == "in process")
            servers = [
                stack.enter_context(nerite(name, models, folder, ASLEEP, *flags))
                for name, flags in {"off": (), "ledger": (f"--ledger={folder / 'ledger.db'}",)}.items()
            ]
            loads = {
                **{f"HTTP, c={count}": partial(wrk, folder, "small", count, seconds) for count in (1, 16, 64)},
                "gRPC, 16 streams": partial(h2load, folder, "small", 1, 16, seconds),
            }
            for called, made in loads.items():
                load = made()
                found = [_round(load, servers, seconds, first=number % len(servers)) for number in range(rounds)]
                off, on = (Cost(*map(statistics.median, zip(*each, strict=True))) for each in zip(*found, strict=True))
                lines.append(
                    f"| {place}, {called} | {off.rate:,.0f} | {on.rate:,.0f} | {off.microseconds:.1f} "
                    f"| {on.microseconds:.1f} | **{on.microseconds - off.microseconds:.1f}** |"
                )
    return "\n".join(lines) + "\n"


def _round(load: Load, servers: Sequence[Contestant], seconds: float, first: int) -> list[Cost]:
    """Return the cost of each server; which of them is asked first changes."""
    costs = {server.name: _cost(load, server, seconds) for server in (*servers[first:], *servers[:first])}
    return [costs[server.name] for server in servers]


def _cost(load: Load, server: Contestant, seconds: float) -> Cost:
    before = _processor_seconds(server.process.pid)
    rate = load(server).rate
    return Cost(rate, (_processor_seconds(server.process.pid) - before) / (rate * seconds) * 1e6)


def _processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
