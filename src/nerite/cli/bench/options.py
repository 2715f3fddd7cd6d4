"""The options of ``nerite bench``."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

from nerite.bench.figures import QUANTILES
from nerite.bench.measurement import Rule
from nerite.bench.objectives import MEASURES, Objective
from nerite.bench.search import Limit
from nerite.cli.bench.levels import counts, numbers
from nerite.cli.client.connection import add_connection
from nerite.cli.client.values import parameter
from nerite.cli.command import new_parser
from nerite.cli.suggestion import did_you_mean

PROGRAM = "nerite bench"
_EPILOG = """\
Works with every server that speaks KServe v2 over HTTP or gRPC (Nerite, Triton, and others), or
has chat completions under /v1 (vLLM, and others).
Levels of load are a number, several (1,2,4), a range (1:8), one in steps (1:32:4), or one that doubles (1:32:*2).
What is measured is the last three windows that agree. Client is the share of a processor that the busiest process of
this program used: near 100 % it is the client that is measured, and not the server.
The exit status is 0 for success, 1 for a refusal or a server that cannot be reached, 2 for a wrong command line, 130
after Ctrl-C.

Examples:
  nerite bench resnet
  nerite bench resnet --concurrency 1:64:*2 --html resnet.html
  nerite bench resnet --rate 100,5000 --within p99:20
  nerite bench resnet --protocol grpc --url gpu-3:8001 --rate 500,1000 --poisson
  nerite bench llama --protocol openai --rate 2 --parameter max_tokens=64 --slo ttft:300 --slo itl:50
"""
_DEFAULT_URLS = {"http": "localhost:8000", "grpc": "localhost:8001", "openai": "localhost:8000"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits where it is wrong."""
    parser = new_parser(PROGRAM, "Measure how fast a model of a running server is, and at what latency.", _EPILOG)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--version", default="", help="ask this version, and not the one that the server chooses")
    _add_load(parser)
    _add_data(parser)
    add_measurement(parser).add_argument(
        "--slo",
        metavar="MEASURE:MS",
        type=_objective,
        action="append",
        default=[],
        help="count the answers that are good: latency, ttft (first token) or itl (between tokens) at most so many ms",
    )
    _add_results(parser)
    add_connection(parser, url="")
    parser.add_argument(
        "--protocol",
        choices=tuple(_DEFAULT_URLS),
        default="http",
        help="what is spoken (default: http); grpc is at port 8001, openai is chat completions, streamed",
    )
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        near = did_you_mean(unknown[0].partition("=")[0], known)
        parser.error(" ".join(filter(None, (f"unknown argument '{unknown[0]}'.", near))))
    _check(parser, options)
    options.url = options.url or _DEFAULT_URLS[options.protocol]
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that say nothing together."""
    if options.shared_memory and options.streaming and options.protocol == "http":
        parser.error("--shared-memory is not for generate_stream: use --protocol grpc")
    if options.output_shared_memory and not options.shared_memory:
        parser.error("--output-shared-memory needs --shared-memory")
    if options.protocol == "openai" and (options.sequence_length or options.shared_memory or options.data == "zero"):
        parser.error("--protocol openai has neither sequences nor shared memory, and no data but prompts")
    if options.within is not None:
        levels = options.rate or options.concurrency
        if len(levels) < 2 or levels[0] >= levels[-1]:
            parser.error("--within searches between two loads, a low and a high one: write --rate 100,5000")
    if options.poisson and not options.rate:
        parser.error("--poisson is for --rate: a number of requests under way has no moments of its own")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load")
    load = group.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        metavar="LEVELS",
        type=counts,
        default=(1,),
        help="so many requests under way at any time (default: 1)",
    )
    load.add_argument("--rate", metavar="LEVELS", type=numbers, help="so many requests a second, whatever comes back")
    poisson = "with --rate: at random moments, as independent callers come; otherwise at a steady pace"
    group.add_argument("--poisson", action="store_true", help=poisson)
    group.add_argument(
        "--within",
        metavar="MEASURE:MS",
        type=_limit,
        help="find the highest load, between the first and the last of LEVELS, at which mean, p50, p90, p95, p99 or "
        "p99.9 is at most so many ms",
    )
    processes = "processes that put on the load (default: 1)"
    group.add_argument("--processes", metavar="N", type=at_least_one, default=1, help=processes)


def add_tensors(group: argparse._ArgumentGroup) -> None:
    """Add the options that say what inputs are like."""
    group.add_argument("--batch", metavar="N", type=at_least_one, default=1, help="elements of a request (default: 1)")
    group.add_argument(
        "--shape",
        metavar="INPUT:SIZES",
        type=_shape,
        action="append",
        default=[],
        help="the shape of an input, without the batch, such as pixels:3,224,224 (default: 1 for each free size)",
    )
    group.add_argument(
        "--data",
        metavar="SOURCE",
        default="random",
        help="random (default), zero, a JSON file in perf_analyzer's form, or a directory with a file for each input",
    )


def add_requests(group: argparse._ArgumentGroup) -> None:
    """Add the options that say what requests are like otherwise."""
    group.add_argument(
        "--parameter",
        metavar="NAME=VALUE",
        action="append",
        type=parameter,
        default=[],
        help="a parameter of each request, such as max_tokens=64; may be given several times",
    )
    streaming = "answers come in parts: generate_stream over HTTP, ModelStreamInfer over gRPC"
    group.add_argument("--streaming", action="store_true", help=streaming)
    group.add_argument(
        "--sequence-length",
        metavar="N",
        type=at_least_one,
        default=0,
        help="send sequences of so many requests, one at a time in each that is under way",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is sent")
    add_tensors(group)
    add_requests(group)
    words = "with --protocol openai: the length of prompts that are made up (default: 100)"
    group.add_argument("--prompt-words", metavar="N", type=at_least_one, default=100, help=words)
    ids = "the first of the ids that sequences have (default: 1)"
    group.add_argument("--first-sequence-id", metavar="N", type=at_least_one, default=1, help=ids)
    memory = "inputs are in system shared memory, which the server has to share with this machine"
    group.add_argument("--shared-memory", action="store_true", help=memory)
    room = "with --shared-memory: outputs as well, in so many bytes each"
    group.add_argument("--output-shared-memory", metavar="BYTES", type=at_least_one, default=0, help=room)
    group.add_argument("--output", metavar="NAME", action="append", default=[], help="ask for this output alone")


def add_measurement(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options that say how long to measure; return their group."""
    group = parser.add_argument_group("the measurement")
    rule = Rule()
    group.add_argument(
        "--warm-up", metavar="SECONDS", type=float, default=1.0, help="load that is not counted (default: 1)"
    )
    window = f"how long a window is; one with few requests is longer (default: {rule.seconds:g})"
    group.add_argument("--window", metavar="SECONDS", type=float, default=rule.seconds, help=window)
    stability = f"three windows agree if none is this many percent from their mean (default: {rule.percentage:g})"
    group.add_argument("--stability", metavar="PERCENT", type=float, default=rule.percentage, help=stability)
    most = f"give up waiting for that after so many windows (default: {rule.most})"
    group.add_argument("--windows", metavar="N", type=at_least_one, default=rule.most, help=most)
    return group


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the results")
    group.add_argument("--json", metavar="FILE", type=Path, help="write all figures as JSON")
    group.add_argument("--csv", metavar="FILE", type=Path, help="write a line for each level")
    group.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots, in one file")


def _objective(text: str) -> Objective:
    return Objective(*_bound(text, MEASURES, "objective", "ttft:200"))


def _limit(text: str) -> Limit:
    return Limit(*_bound(text, ("mean", *QUANTILES), "limit", "p99:20"))


def _bound(text: str, measures: Collection[str], kind: str, example: str) -> tuple[str, float]:
    measure, _, most = text.partition(":")
    try:
        milliseconds = float(most)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no {kind}: write {example}") from None
    if measure not in measures:
        near = did_you_mean(measure, measures) or f"There are: {', '.join(measures)}."
        raise argparse.ArgumentTypeError(f"there is no measure '{measure}'. {near}")
    return measure, milliseconds


def at_least_one(text: str) -> int:
    """Read a number of things."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is less than 1")
    return number


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, sizes = text.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        shape = (-1,)
    if not colon or not name or any(size < 0 for size in shape):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape: write INPUT:3,224,224")
    return name, shape
