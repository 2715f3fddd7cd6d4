"""The options of ``nerite analyze``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nerite.analyze.settings import SETTINGS, Value
from nerite.cli.bench.levels import counts
from nerite.cli.bench.options import add_measurement, add_requests, add_tensors, at_least_one
from nerite.cli.command import add_repository, new_parser
from nerite.cli.suggestion import did_you_mean

PROGRAM = "nerite analyze"
_SETTINGS = "\n".join(f"  {name:12}{setting.purpose}" for name, setting in SETTINGS.items())
_EPILOG = f"""\
Settings:
{_SETTINGS}

Several models are asked at once, on one server, and their settings varied together. Of an ensemble those of its models
are varied. Settings of one of several models are MODEL.SETTING.
Each configuration is measured in a server of its own, on a port of its own, and the best few again, in turns. The
repository is not written to without --apply. Leave the machine to it meanwhile. What was measured is kept in the
checkpoint: the same command goes on after Ctrl-C, and asks for nothing twice where the limits or the values change.
The exit status is 0 for success, 1 for a model that cannot be analyzed or where nothing keeps to the limits, 2 for a
wrong command line, 130 after Ctrl-C.

Examples:
  nerite analyze resnet
  nerite analyze resnet --max-p99 50 --max-memory 2000 --concurrency 1,8,32
  nerite analyze resnet --objective latency --min-rate 200
  nerite analyze resnet --search brute --set max_batch=8,16,32 --set instances=1,2 --apply
  nerite analyze resnet bert --set bert.instances=1,2 --html both.html
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits where it is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    models: list[str] = options.models
    if len(set(models)) < len(models):
        parser.error("a model is named twice")
    if len(models) > 1 and options.data not in ("random", "zero"):
        parser.error("--data of a file is for one model: several have inputs of their own")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(PROGRAM, "Find the configuration with which models answer most, by measuring.", _EPILOG)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="what is asked; several are asked at once")
    add_repository(parser)
    parser.add_argument(
        "--bls-composing-models",
        metavar="MODELS",
        type=lambda text: tuple(text.split(",")),
        default=(),
        help="models that those call (BLS): they are loaded, too, and their settings varied",
    )
    parser.add_argument("--apply", action="store_true", help="write the best configuration into the repository")
    where = "where to keep what was measured (default: MODEL.analysis.jsonl)"
    parser.add_argument("--checkpoint", metavar="FILE", type=Path, help=where)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all that was found as JSON, the best first")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots, in one file")
    _add_search(parser.add_argument_group("the search"))
    _add_goal(parser.add_argument_group("the goal"))
    _add_load(parser.add_argument_group("the load"))
    add_measurement(parser)
    return parser


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--search",
        choices=("quick", "guided", "brute"),
        default="guided",
        help="guided (default): always what promises most by what was measured before, with a quarter of all "
        "measurements at most; quick: a climb from the present configuration; brute: all",
    )
    group.add_argument(
        "--set",
        metavar="SETTING=VALUES",
        action="append",
        type=_setting,
        default=[],
        help="values to try, such as max_batch=1,8,32 or resnet.instances=1,2; may be given several times",
    )
    group.add_argument("--most", metavar="N", type=at_least_one, help="try at most so many configurations")


def _add_goal(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--objective",
        choices=("throughput", "latency", "memory"),
        default="throughput",
        help="what is best within the limits: the most answers (default), the least p99, or the least memory",
    )
    p99 = "of 100 answers 99 take no longer"
    group.add_argument("--max-p99", "--latency-budget", metavar="MS", type=_positive, help=p99)
    group.add_argument("--max-memory", metavar="MB", type=_positive, help="the models take no more at work")
    rate = "so many answers a second at least; of several models, of each"
    group.add_argument("--min-rate", "--min-throughput", metavar="RATE", type=_positive, help=rate)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        metavar="LEVELS",
        type=counts,
        default=(1, 8, 32),
        help="so many requests under way, to each model; the level that is best within the limits counts "
        "(default: 1,8,32)",
    )
    group.add_argument("--protocol", choices=("http", "grpc"), default="http", help="what is spoken (default: http)")
    add_tensors(group)
    add_requests(group)


def _setting(text: str) -> tuple[str, str, Sequence[Value]]:
    key, equals, said = text.partition("=")
    if not equals or not said:
        raise argparse.ArgumentTypeError(f"'{text}' names no values: write max_batch=1,8,32")
    model, _, name = key.rpartition(".")
    if name not in SETTINGS:
        near = did_you_mean(name, SETTINGS) or f"There are: {', '.join(SETTINGS)}."
        raise argparse.ArgumentTypeError(f"there is no setting '{name}'. {near}")
    try:
        return model, name, [SETTINGS[name].parsed(value) for value in said.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{said}': values of {name} are whole numbers, such as 1,8,32") from None


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not more than 0")
    return number
