"""Start-up time and memory of a server with nothing to serve, and with one Python model."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from contestants import identity_repository, nerite, real_triton

_ROUNDS = 5


def resident(pid: int) -> float:
    """Return the megabytes of a process and its descendants, shared pages divided among those that share them."""
    return sum(own(process) for process in [pid, *descendants(pid)])


def own(pid: int) -> float:
    """Return the megabytes of a process alone, with its part of what it shares; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


def descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` started, and those that they started."""
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    children = [int(line) for line in done.stdout.split()]
    return [*children, *(below for child in children for below in descendants(child))]


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process and its descendants have used."""
    ticks = 0
    for process in [pid, *descendants(pid)]:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def report() -> str:
    """Return the table."""
    lines = ["### Start and memory", "", "| | ready after | memory |", "|---|---|---|"]
    for title, empty in (("nothing to serve", True), ("one Python model", False)):
        for name in ("Triton", "Nerite"):
            seconds, megabytes = [], []
            for _ in range(_ROUNDS):
                with tempfile.TemporaryDirectory() as temporary:
                    folder = Path(temporary)
                    repository = folder / "empty" if empty else identity_repository(folder)
                    repository.mkdir(exist_ok=True)
                    # The files of the reference are copied into place before the clock starts.
                    server = real_triton(repository, folder) if name == "Triton" else nerite(name, repository, folder)
                    began = time.monotonic()
                    with server as contestant:
                        seconds.append(time.monotonic() - began)
                        megabytes.append(resident(contestant.process.pid))
            lines.append(
                f"| {name}, {title} | {statistics.median(seconds):.2f} s | {statistics.median(megabytes):.0f} MB |"
            )
    return "\n".join(lines) + "\n"
