"""``nerite client load``: Load a model, or load it again, and wait until it is ready.

The server has to be in the control mode 'explicit'.
"""

from __future__ import annotations

import argparse

from nerite.cli.client.values import content
from nerite.cli.command import show
from nerite.cli.usage_error import UsageError
from nerite.client import Client

EXAMPLES = """\
Examples:
  nerite client load scaler
  nerite client load scaler --config '{"max_batch_size": 16}'
  nerite client load scaler --config @scaler.json --file 1/model.py=new/model.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--config", metavar="JSON", help="take this for config.pbtxt: JSON, or @FILE that has it")
    parser.add_argument(
        "--file",
        metavar="PATH=FILE",
        action="append",
        default=[],
        help="take FILE for the file PATH of the model's directory, and nothing else of it; needs --config; "
        "may be given several times",
    )


def run(client: Client, options: argparse.Namespace) -> int:
    """Load the model; return the exit status."""
    config = options.config
    if config is not None and config.startswith("@"):
        config = content(config[1:]).decode(errors="replace")
    client.load(options.model, config=config, files=dict(map(_file, options.file)))
    show(f"{options.model} is loaded.")
    return 0


def _file(word: str) -> tuple[str, bytes]:
    path, equals, file = word.partition("=")
    if not equals:
        raise UsageError(
            f"'{word}' is no file of a model.", remedy="Write it as PATH=FILE, such as 1/model.py=model.py"
        )
    return path, content(file)
