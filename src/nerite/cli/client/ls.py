"""``nerite client ls``: List the models of the repository, their versions and states."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from nerite.cli.command import show, show_json, show_table
from nerite.client import Client

EXAMPLES = """\
Examples:
  nerite client ls
  nerite client ls --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(client: Client, options: argparse.Namespace) -> int:
    """Print the index; return the exit status."""
    versions = client.models()
    if options.json:
        show_json([asdict(version) for version in versions])
    elif versions:
        rows = [(entry.name, entry.version, entry.state or "not loaded", entry.reason) for entry in versions]
        show_table(("Model", "Version", "State", "Reason"), rows)
    else:
        show("The repository is empty.")
    return 0
