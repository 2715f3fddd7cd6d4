"""``nerite client unload``: Unload a model. Requests that it has are finished first.

The server has to be in the control mode 'explicit'.
"""

from __future__ import annotations

import argparse

from nerite.cli.command import show
from nerite.client import Client

EXAMPLES = """\
Examples:
  nerite client unload scaler
  nerite client unload an_ensemble --dependents
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--dependents", action="store_true", help="unload also the models that were loaded for it")


def run(client: Client, options: argparse.Namespace) -> int:
    """Unload the model; return the exit status."""
    client.unload(options.model, dependents=options.dependents)
    show(f"{options.model} is being unloaded.")
    return 0
