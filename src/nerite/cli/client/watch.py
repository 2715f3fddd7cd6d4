"""``nerite client watch``: Show requests a second, and how long they took, again and again until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from nerite.cli.command import show
from nerite.client import Client, ModelStatistics
from nerite.observability.table import render, terminal_width

EXAMPLES = """\
At a terminal the table stays in its place. Elsewhere there is a line for each model that was used.

Examples:
  nerite client watch
  nerite client watch scaler --interval 10 >> scaler.log
"""
_HEADINGS = ("Model", "Version", "Requests/s", "Failures/s", "Queue ms", "Compute ms", "Mean batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="this model alone")
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=1.0, help="default: 1")
    parser.add_argument("--count", metavar="N", type=int, default=0, help="end after N intervals")


def run(client: Client, options: argparse.Namespace) -> int:
    """Print what happened in each interval; return the exit status."""
    height = 0
    before, began = client.statistics(options.model), time.monotonic()
    intervals = 0
    try:
        while not options.count or intervals < options.count:
            time.sleep(options.interval)
            after, ended = client.statistics(options.model), time.monotonic()
            happened = between(before, after)
            if sys.stdout.isatty():
                text = frame(happened, ended - began, terminal_width())
                show(f"\x1b[{height}F\x1b[J{text}" if height else text)
                height = text.count("\n") + 1
            else:
                show(lines(happened, ended - began, time.strftime("%H:%M:%S")))
            before, began = after, ended
            intervals += 1
    except KeyboardInterrupt:
        pass
    return 0


def between(before: Sequence[ModelStatistics], after: Sequence[ModelStatistics]) -> list[ModelStatistics]:
    """Return what was counted from one time to another, of the versions that there are at the second."""
    earlier = {(version.name, version.version): version for version in before}
    return [version.since(earlier.get((version.name, version.version))) for version in after]


def frame(happened: Sequence[ModelStatistics], seconds: float, width: int) -> str:
    """Return what happened in ``seconds`` as a table."""
    return render(
        _HEADINGS, [(version.name, version.version, *_cells(version, seconds)) for version in happened], width
    )


def lines(happened: Sequence[ModelStatistics], seconds: float, clock: str) -> str:
    """Return what happened as a line for each version that was used; one that says so if none was."""
    said = []
    for version in happened:
        if version.requests:
            requests, failures, queue, compute, batch = _cells(version, seconds)
            said.append(
                f"{clock} {version.name} {version.version}: {requests} requests/s, {failures} failures/s, "
                f"queue {queue} ms, compute {compute} ms, batch {batch}"
            )
    return "\n".join(said) or f"{clock} no requests"


def _cells(version: ModelStatistics, seconds: float) -> tuple[str, str, str, str, str]:
    return (
        f"{version.requests / seconds:.1f}",
        f"{version.fail.count / seconds:.1f}",
        f"{version.queue.mean_ms:.3f}",
        f"{version.mean_compute_ms:.3f}",
        f"{version.mean_batch:.1f}",
    )
