"""The options of ``nerite analyze``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nerite.analyze.settings import SETTINGS, Value
from nerite.cli.bench.levels import counts
from nerite.cli.bench.options import add_measurement, add_tensors
from nerite.cli.command import add_repository, new_parser
from nerite.cli.suggestion import did_you_mean

PROGRAM = "nerite analyze"
_SETTINGS = "\n".join(f"  {name:12}{setting.purpose}" for name, setting in SETTINGS.items())
_EPILOG = f"""\
Settings:
{_SETTINGS}

Each configuration is measured in a server of its own, on a port of its own. The repository is not written to without
--apply. Leave the machine to it meanwhile. What was measured is kept in the checkpoint: the same command goes on after
Ctrl-C, and asks for nothing twice where the limits or the values change.
The exit status is 0 for success, 1 for a model that cannot be analyzed or where nothing keeps to the limits, 2 for a
wrong command line, 130 after Ctrl-C.

Examples:
  nerite analyze resnet
  nerite analyze resnet --max-p99 50 --max-memory 2000 --concurrency 1,8,32
  nerite analyze resnet --search brute --set max_batch=8,16,32 --set instances=1,2 --apply
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = new_parser(PROGRAM, "Find the configuration with which a model answers most, by measuring.", _EPILOG)
    parser.add_argument("model", metavar="MODEL")
    add_repository(parser)
    parser.add_argument(
        "--search",
        choices=("quick", "guided", "brute"),
        default="guided",
        help="quick: a climb from the present configuration; guided (default): from several, with a quarter of all "
        "measurements at most; brute: all",
    )
    parser.add_argument(
        "--set",
        metavar="SETTING=VALUES",
        action="append",
        type=_setting,
        default=[],
        help="values to try, such as max_batch=1,8,32; may be given several times",
    )
    parser.add_argument("--apply", action="store_true", help="write the best configuration into the repository")
    where = "where to keep what was measured (default: MODEL.analysis.jsonl)"
    parser.add_argument("--checkpoint", metavar="FILE", type=Path, help=where)
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots, in one file")
    limits = parser.add_argument_group("the limits")
    limits.add_argument("--max-p99", metavar="MS", type=_positive, help="of 100 answers 99 take no longer")
    limits.add_argument("--max-memory", metavar="MB", type=_positive, help="the model takes no more at work")
    _add_load(parser.add_argument_group("the load"))
    add_measurement(parser)
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        metavar="LEVELS",
        type=counts,
        default=(1, 8, 32),
        help="so many requests under way; the level that shows the most within the limits counts (default: 1,8,32)",
    )
    add_tensors(group)


def _setting(text: str) -> tuple[str, Sequence[Value]]:
    name, equals, said = text.partition("=")
    if not equals or not said:
        raise argparse.ArgumentTypeError(f"'{text}' names no values: write max_batch=1,8,32")
    if name not in SETTINGS:
        near = did_you_mean(name, SETTINGS) or f"There are: {', '.join(SETTINGS)}."
        raise argparse.ArgumentTypeError(f"there is no setting '{name}'. {near}")
    try:
        return name, [SETTINGS[name].parsed(value) for value in said.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{said}': values of {name} are whole numbers, such as 1,8,32") from None


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not more than 0")
    return number
