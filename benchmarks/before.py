"""A version beside an earlier one: writes the tables of docs/benchmarks.md.

    git worktree add --detach ../before REVISION
    python benchmarks/before.py ../before [--seconds S] [--rounds N] [--only NAME ...] [--instructions] [--print]

Both serve the loads of benchmarks/run.py, in turns. "ratio" is the median of the ratios of two runs that follow each
other; "processor time" is that of the server and its workers for a request, as a ratio, too. --instructions counts
what the server executes for a request, with callgrind (Debian: valgrind), less what it executes when idle.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from contestants import ROOT, Contestant, identity_repository, nerite
from loads import Load, Pace, h2load, need, write_bodies, wrk
from page import command_line, machine, publish
from run import Cell, patiently, tables

_MODES = {"worker": False, "in process": True}
_TICK = os.sysconf("SC_CLK_TCK")
_COUNTED_SECONDS = 3.0
_PATIENCE = 60.0


def family(process: int) -> Iterator[int]:
    """Yield a process and all that come from it."""
    yield process
    # A child belongs to the thread that started it.
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = thread.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


def spent(server: Contestant) -> float:
    """Return the seconds of processor time that a server and its workers have used."""
    ticks = 0
    for process in family(server.process.pid):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICK


def timed(load: Load, server: Contestant, seconds: float) -> tuple[float, float]:
    """Return the requests a second of a run, and the processor time of the server for one."""
    began = spent(server)
    pace: Pace = patiently(load, server)
    return pace.rate, (spent(server) - began) / (pace.rate * seconds)


def compared(cell: Cell, mode: str, servers: list[Contestant], seconds: float, rounds: int) -> str:
    """Return a line of the table: both servers in turns, each first as often as the other."""
    runs: list[list[tuple[float, float]]] = []
    for number in range(rounds):
        order = servers if number % 2 else servers[::-1]
        done = {server.name: timed(cell.load, server, seconds) for server in order}
        runs.append([done[server.name] for server in servers])
    rates = [statistics.median(run[at][0] for run in runs) for at in (0, 1)]
    ratio = statistics.median(after[0] / before[0] for before, after in runs)
    processor = statistics.median(after[1] / before[1] for before, after in runs)
    line = f"| {cell.name}, {mode} | {rates[0]:,.0f} | {rates[1]:,.0f} | **{ratio:.2f}** | {processor:.2f} |"
    print(line, file=sys.stderr, flush=True)
    return line


def instructions(checkout: Path, folder: Path, repository: Path) -> dict[str, float]:
    """Return the instructions that the server of a checkout executes for a request, by load."""
    loads = {
        "Small: HTTP c=16": wrk(folder, "small", 16, _COUNTED_SECONDS),
        "Small: gRPC 8 connections x 8": h2load(folder, "small", 8, 8, _COUNTED_SECONDS),
        "Large: HTTP c=16": wrk(folder, "large", 16, _COUNTED_SECONDS),
        "Large: gRPC 16 streams": h2load(folder, "large", 1, 16, _COUNTED_SECONDS),
    }
    found = {}
    for name, load in loads.items():
        written = Path(tempfile.mkdtemp(dir=folder)) / "callgrind"
        under = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={written}"]
        # Nobody waits awake, which would be counted.
        flags = ("--stay-awake-microseconds=0",)
        with nerite("counted", repository, folder, *flags, checkout=checkout, under=under) as server:
            load(server)
            time.sleep(1)
            counted(server, written)
            time.sleep(_COUNTED_SECONDS)
            idle = counted(server, written)
            requests = load(server).rate * _COUNTED_SECONDS
            found[name] = (counted(server, written) - idle) / requests
    return found


def counted(server: Contestant, written: Path) -> int:
    """Return the instructions since the last time."""
    before = set(written.parent.glob(f"{written.name}.*"))
    subprocess.run(["callgrind_control", "-d", str(server.process.pid)], capture_output=True, check=True)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        for path in set(written.parent.glob(f"{written.name}.*")) - before:
            if total := re.search(r"^(?:totals|summary): (\d+)", path.read_text(), re.MULTILINE):
                return int(total[1])
        time.sleep(0.1)
    raise RuntimeError("callgrind wrote nothing")


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__, 1.0, 15)
    parser.add_argument("before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--only", nargs="*", default=[], help="cells whose name or table contains one of these")
    parser.add_argument("--instructions", action="store_true", help="count instructions, too")
    options = parser.parse_args()
    need("wrk", "h2load", *(["valgrind"] if options.instructions else []))
    versions = {"before": options.before.resolve(), "now": ROOT}
    text = f"Measured on {machine()}; {options.rounds} rounds of {options.seconds:g} s; requests a second.\n\n"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_bodies(folder)
        repositories = {mode: identity_repository(folder / mode, in_process=inside) for mode, inside in _MODES.items()}
        servers = {
            mode: [
                stack.enter_context(nerite(f"{mode}, {which}", repository, folder, checkout=checkout))
                for which, checkout in versions.items()
            ]
            for mode, repository in repositories.items()
        }
        text += "| | before | now | ratio | processor time |\n|---|---|---|---|---|\n"
        for title, cells in tables(folder, options.seconds).items():
            for cell in cells:
                if not options.only or any(part in f"{title} {cell.name}" for part in options.only):
                    named = cell._replace(name=f"{title.partition(' ')[0]}: {cell.name}")
                    for mode, pair in servers.items():
                        text += compared(named, mode, pair, options.seconds, options.rounds) + "\n"
        stack.close()
        if options.instructions:
            text += "\n| instructions of the server for a request | before | now | ratio |\n|---|---|---|---|\n"
            for mode, repository in repositories.items():
                before, now = (instructions(checkout, folder, repository) for checkout in versions.values())
                for load, count in now.items():
                    text += (
                        f"| {load}, {mode} | {before[load]:,.0f} | {count:,.0f} | **{count / before[load]:.3f}** |\n"
                    )
    publish("before", text, options)


if __name__ == "__main__":
    main()
