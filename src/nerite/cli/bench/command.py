"""The command line of ``nerite bench``: what is asked of which server, how much of it, and where the figures go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from nerite.bench.fleet import Fleet
from nerite.bench.measurement import Rule
from nerite.bench.plan import Level, Plan
from nerite.bench.preparation import Target, Wanted, prepared
from nerite.bench.report import csv_form, html_form, json_form
from nerite.bench.server import GrpcServer, Server
from nerite.bench.session import Look, Session
from nerite.cli.bench.levels import counts, numbers
from nerite.cli.bench.table import headings, remarks, row
from nerite.cli.client.connection import add_connection, connected
from nerite.cli.command import new_parser, show, show_table, status_of
from nerite.cli.progress import Progress
from nerite.cli.suggestion import did_you_mean
from nerite.client import ClientError, ModelStatistics
from nerite.client.address import Address
from nerite.client.error import Unreachable

_PROGRAM = "nerite bench"
_EPILOG = """\
Works with every server that speaks KServe v2 over HTTP or gRPC: Nerite, Triton, and others.
Levels of load are a number, several (1,2,4), a range (1:8), one in steps (1:32:4), or one that doubles (1:32:*2).
What is measured is the last three windows that agree. Client is the share of a processor that the busiest process of
this program used: near 100 % it is the client that is measured, and not the server.
The exit status is 0 for success, 1 for a refusal or a server that cannot be reached, 2 for a wrong command line, 130
after Ctrl-C.

Examples:
  nerite bench resnet
  nerite bench resnet --concurrency 1:64:*2 --html resnet.html
  nerite bench resnet --protocol grpc --url gpu-3:8001 --rate 500,1000 --poisson
"""
_DEFAULT_URLS = {"http": "localhost:8000", "grpc": "localhost:8001"}


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of(_PROGRAM, lambda: _bench(_parse(arguments)), ClientError)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(_PROGRAM, "Measure how fast a model of a running server is, and at what latency.", _EPILOG)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--version", default="", help="ask this version, and not the one that the server chooses")
    _add_load(parser)
    _add_data(parser)
    _add_measurement(parser)
    _add_results(parser)
    add_connection(parser, url="")
    parser.add_argument(
        "--protocol",
        choices=("http", "grpc"),
        default="http",
        help="what is spoken (default: http); grpc has port 8001",
    )
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        near = did_you_mean(unknown[0].partition("=")[0], known)
        parser.error(" ".join(filter(None, (f"unknown argument '{unknown[0]}'.", near))))
    if options.poisson and not options.rate:
        parser.error("--poisson is for --rate: a number of requests under way has no moments of its own")
    options.url = options.url or _DEFAULT_URLS[options.protocol]
    return options


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
    processes = "processes that put on the load (default: 1)"
    group.add_argument("--processes", metavar="N", type=_at_least_one, default=1, help=processes)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is sent")
    group.add_argument("--batch", metavar="N", type=_at_least_one, default=1, help="elements of a request (default: 1)")
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
    group.add_argument("--output", metavar="NAME", action="append", default=[], help="ask for this output alone")


def _add_measurement(parser: argparse.ArgumentParser) -> None:
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
    group.add_argument("--windows", metavar="N", type=_at_least_one, default=rule.most, help=most)


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the results")
    group.add_argument("--json", metavar="FILE", type=Path, help="write all figures as JSON")
    group.add_argument("--csv", metavar="FILE", type=Path, help="write a line for each level")
    group.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots, in one file")


def _bench(options: argparse.Namespace) -> int:
    rule = Rule(options.window, percentage=options.stability, most=options.windows)
    target = Target(options.protocol, Address.parse(options.url), dict(options.header), options.timeout)
    with ExitStack() as stack:
        server = _server(options, target, stack)
        plan = _prepared(options, target, server)
        fleet = stack.enter_context(Fleet(plan, options.processes))
        session = Session(fleet, rule, options.warm_up, count=lambda: _counted(server, options))
        with Progress() as progress:
            outcomes = list(session.run(_levels(options), lambda look: _show_progress(progress, look)))
    table = [headings(outcomes), *(row(outcome) for outcome in outcomes)]
    told = list(remarks(outcomes, options.stability))
    show_table(table[0], table[1:])
    for remark in told:
        show(remark)
    if options.json is not None:
        _write(options.json, json_form.render(options.model, outcomes))
    if options.csv is not None:
        _write(options.csv, csv_form.render(outcomes))
    if options.html is not None:
        _write(options.html, html_form.render(_heading(options, target), outcomes, table, told))
    return 0


def _levels(options: argparse.Namespace) -> list[Level]:
    if options.rate:
        return [Level(rate=rate, arrivals="poisson" if options.poisson else "constant") for rate in options.rate]
    return [Level(concurrency=count) for count in options.concurrency]


def _server(options: argparse.Namespace, target: Target, stack: ExitStack) -> Server:
    if target.protocol == "grpc":
        return GrpcServer(target.plan())
    return stack.enter_context(connected(options))


def _prepared(options: argparse.Namespace, target: Target, server: Server) -> Plan:
    try:
        return prepared(_wanted(options), target, server)
    except Unreachable:
        raise
    except ClientError as error:
        raise ClientError("\n    ".join(filter(None, (str(error), _near(options.model, server))))) from error


def _near(model: str, server: Server) -> str:
    """Return the model that may have been meant, where there is none of that name."""
    try:
        names = {entry.name for entry in server.models()}
    except ClientError:
        return ""
    return "" if model in names else did_you_mean(model, names)


def _wanted(options: argparse.Namespace) -> Wanted:
    return Wanted(
        model=options.model,
        version=options.version,
        batch=options.batch,
        shapes=dict(options.shape),
        data=options.data if options.data in ("random", "zero") else Path(options.data),
        outputs=options.output,
    )


def _counted(server: Server, options: argparse.Namespace) -> ModelStatistics | None:
    """Return what the server has counted; None if it does not tell."""
    try:
        versions = server.statistics(options.model, options.version)
    except ClientError:
        return None
    # The one that answers is the one that was asked last.
    return max(versions, key=lambda version: version.last_inference, default=None)


def _show_progress(progress: Progress, look: Look) -> None:
    what = f"{look.level.kind} {look.level}"
    if look.warming_up:
        progress.part(what, look.part, "warming up")
    else:
        rate = f", {look.rate:,.0f} requests/s" if look.rate else ""
        progress.part(what, look.part, f"window {look.windows + 1}{rate}")


def _heading(options: argparse.Namespace, target: Target) -> html_form.Heading:
    settings = f"{options.protocol}, batches of {options.batch}, windows of {options.window:g} s"
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return html_form.Heading(options.model, str(target.address), settings, when)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ClientError(f"the figures cannot be written to {path}: {error.strerror}") from None


def _at_least_one(text: str) -> int:
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
