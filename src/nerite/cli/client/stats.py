"""``nerite client stats``: Show what was counted about each version of each model since it was loaded."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from nerite.cli.command import show_json, show_table
from nerite.client import Client, ModelStatistics

EXAMPLES = """\
Times are means over requests: in the queue, and computed. A batch is what was executed at once.

Examples:
  nerite client stats
  nerite client stats scaler --json
"""
_HEADINGS = ("Model", "Version", "Requests", "Failures", "Queue ms", "Compute ms", "Mean batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="this model alone")
    parser.add_argument("--json", action="store_true", help="print a JSON list of all counts, times in nanoseconds")


def run(client: Client, options: argparse.Namespace) -> int:
    """Print the statistics; return the exit status."""
    found = client.statistics(options.model)
    if options.json:
        show_json([asdict(version) for version in found])
    else:
        show_table(_HEADINGS, [_row(version) for version in found])
    return 0


def _row(version: ModelStatistics) -> tuple[str, ...]:
    return (
        version.name,
        version.version,
        str(version.requests),
        str(version.fail.count),
        f"{version.queue.mean_ms:.3f}",
        f"{version.mean_compute_ms:.3f}",
        f"{version.mean_batch:.1f}",
    )
