"""What ``nerite bench`` does: prepares the load, has it measured, and says what it showed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Final

from nerite.cli.command import (
    ProgressBar,
    add_repeated,
    did_you_mean,
    new_parser,
    positive_integer,
    show,
    show_table,
    status_of,
)
from nerite.client import ClientError, ModelStatistics
from nerite.client.connection import Address, Unreachable
from nerite.tools.bench import report, requests
from nerite.tools.bench.measurement import AGREEING, MEASURES, QUANTILES, BenchPlan, LoadLevel, Objective, Rule
from nerite.tools.bench.requests import BenchTarget, TensorLoad, prepared_tensors
from nerite.tools.bench.session import (
    KEPT_UP,
    BenchedServer,
    BenchRegions,
    Fleet,
    GrpcServer,
    LatencyLimit,
    LevelOutcome,
    Search,
    ServerReading,
    Session,
)
from nerite.tools.client_infer import parameter
from nerite.tools.connection import add_connection, connected, remedied

# Reads what load is wanted: a number, several, or a range.

_RANGE: Final = re.compile(r"([\d.]+):([\d.]+)(?::(\*?)([\d.]+))?")
_MAX_LEVELS: Final = 100


def numbers(text: str) -> tuple[float, ...]:
    """Read ``8``, ``1,2,4``, ``1:32`` (each of them), ``1:32:4`` (in steps) or ``1:32:*2`` (doubling)."""
    found: list[float] = []
    try:
        for part in text.split(","):
            match = _RANGE.fullmatch(part)
            if match is None:
                found.append(float(part))
            else:
                first, last, times, step = match.groups("")
                found.extend(_range(float(first), float(last), bool(times), float(step or 1)))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is neither a number nor a range: write 8, 1,2,4, 1:32:4 or 1:32:*2"
        ) from None
    if len(found) > _MAX_LEVELS:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {_MAX_LEVELS} levels: write 1:1000:50 or 1:1000:*2")
    if not all(number > 0 for number in found):
        raise argparse.ArgumentTypeError(f"'{text}': a load is more than 0")
    return tuple(found)


def counts(text: str) -> tuple[int, ...]:
    """Read the same for what is counted."""
    found = numbers(text)
    if any(number % 1 for number in found):
        raise argparse.ArgumentTypeError(f"'{text}': so many requests under way are whole numbers")
    return tuple(map(int, found))


def _range(first: float, last: float, times: bool, step: float) -> Iterator[float]:
    if first <= 0 or last < first or step <= (1 if times else 0):
        raise ValueError
    number = first
    # One more than there may be, so that it is known that there are too many.
    for given in range(1, _MAX_LEVELS + 2):
        if number > last:
            return
        yield number
        number = number * step if times else first + given * step


# The options of ``nerite bench``.

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
    good = "count the answers that are good: latency, ttft (first token) or itl (between tokens) at most so many ms"
    add_repeated(add_measurement(parser), "--slo", "MEASURE:MS", good, _objective)
    _add_results(parser)
    add_connection(parser, url="")
    parser.add_argument(
        "--protocol",
        choices=tuple(_DEFAULT_URLS),
        default="http",
        help="what is spoken (default: http); grpc is at port 8001, openai is chat completions, streamed",
    )
    options = parser.parse_args(arguments)
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
    group.add_argument("--processes", metavar="N", type=positive_integer, default=1, help=processes)


def add_tensors(group: argparse._ArgumentGroup) -> None:
    """Add the options that say what inputs are like."""
    group.add_argument(
        "--batch", metavar="N", type=positive_integer, default=1, help="elements of a request (default: 1)"
    )
    shape = "the shape of an input, without the batch, such as pixels:3,224,224 (default: 1 for each free size)"
    add_repeated(group, "--shape", "INPUT:SIZES", shape, _shape)
    group.add_argument(
        "--data",
        metavar="SOURCE",
        default="random",
        help="random (default), zero, a JSON file in perf_analyzer's form, or a directory with a file for each input",
    )


def add_requests(group: argparse._ArgumentGroup) -> None:
    """Add the options that say what requests are like otherwise."""
    add_repeated(group, "--parameter", "NAME=VALUE", "a parameter of each request, such as max_tokens=64", parameter)
    streaming = "answers come in parts: generate_stream over HTTP, ModelStreamInfer over gRPC"
    group.add_argument("--streaming", action="store_true", help=streaming)
    group.add_argument(
        "--sequence-length",
        metavar="N",
        type=positive_integer,
        default=0,
        help="send sequences of so many requests, one at a time in each that is under way",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is sent")
    add_tensors(group)
    add_requests(group)
    words = "with --protocol openai: the length of prompts that are made up (default: 100)"
    group.add_argument("--prompt-words", metavar="N", type=positive_integer, default=100, help=words)
    ids = "the first of the ids that sequences have (default: 1)"
    group.add_argument("--first-sequence-id", metavar="N", type=positive_integer, default=1, help=ids)
    memory = "inputs are in system shared memory, which the server has to share with this machine"
    group.add_argument("--shared-memory", action="store_true", help=memory)
    room = "with --shared-memory: outputs as well, in so many bytes each"
    group.add_argument("--output-shared-memory", metavar="BYTES", type=positive_integer, default=0, help=room)
    add_repeated(group, "--output", "NAME", "return only this output")


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
    group.add_argument("--windows", metavar="N", type=positive_integer, default=rule.most, help=most)
    return group


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the results")
    group.add_argument("--json", metavar="FILE", type=Path, help="write all figures as JSON")
    group.add_argument("--csv", metavar="FILE", type=Path, help="write a line for each level")
    group.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots, in one file")


def _objective(text: str) -> Objective:
    return Objective(*_bound(text, MEASURES, "objective", "ttft:200"))


def _limit(text: str) -> LatencyLimit:
    return LatencyLimit(*_bound(text, ("mean", *QUANTILES), "limit", "p99:20"))


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


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, sizes = text.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        shape = (-1,)
    if not colon or not name or any(size < 0 for size in shape):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape: write INPUT:3,224,224")
    return name, shape


# What a terminal shows: a row for each level of load, and what is to be said about it.


def headings(outcomes: Sequence[LevelOutcome]) -> list[str]:
    """Return the headings; columns that would be empty are not there."""
    found = ["Rate wanted" if outcomes[0].level.open else "Concurrency", "Requests/s", "Mean ms"]
    found += ["p50 ms", "p90 ms", "p99 ms"]
    if outcomes[0].figures.tokens is not None:
        found += ["First ms", "First p99", "Between ms", "Tokens/s"]
    if outcomes[0].figures.goodput is not None:
        found.append("Good/s")
    if outcomes[0].server is not None:
        found += ["Queue ms", "Compute ms", "Batch"]
    return [*found, "Client", "Failed"]


def row(outcome: LevelOutcome) -> list[str]:
    """Return a row under the headings."""
    figures = outcome.figures
    latency = figures.latency
    cells = [f"{outcome.level}{'' if outcome.stable else ' ~'}", f"{figures.rate:,.1f}"]
    cells += [f"{value:,.3f}" for value in (latency.mean, latency["p50"], latency["p90"], latency["p99"])]
    if figures.tokens is not None:
        tokens = figures.tokens
        cells += [f"{tokens.first['p50']:,.1f}", f"{tokens.first['p99']:,.1f}"]
        cells += [f"{tokens.between.mean:,.2f}" if tokens.between else "", f"{tokens.rate:,.1f}"]
    if figures.goodput is not None:
        cells.append(f"{figures.goodput:,.1f}")
    if outcome.server is not None:
        server = outcome.server
        cells += [f"{server.queue.mean_ms:,.3f}", f"{server.mean_compute_ms:,.3f}", f"{server.mean_batch:,.1f}"]
    return [*cells, f"{outcome.busy:.0%}{' !' if outcome.client_is_the_limit else ''}", str(figures.failed or "")]


def remarks(outcomes: Sequence[LevelOutcome], percentage: float) -> Iterator[str]:
    """Yield what has to be said below the table."""
    if any(not outcome.stable for outcome in outcomes):
        yield (
            f"~ not stable: the last {AGREEING} windows differ by more than {percentage:g} % from their mean. "
            "A longer --window may help."
        )
    if any(outcome.client_is_the_limit for outcome in outcomes):
        yield (
            "! the client was the limit: a process of it was busy all the time, or sent late. "
            "Give it more --processes, or a machine of its own."
        )
    for outcome in outcomes:
        if outcome.level.open and outcome.figures.rate < KEPT_UP * outcome.level.rate:
            yield f"The server did not keep up with {outcome.level}: latencies grow for as long as it goes on."
        for reason, count in outcome.figures.failures.items():
            yield f"{count} failed at {outcome.level}: {reason}"


def found(search: Search) -> str:
    """Return what a search for the highest load within a limit has found."""
    best = search.best
    if best is None:
        return f"No load was within a {search.limit}: begin lower, or allow more."
    level = f"{best.level.kind} {best.level}"
    return f"Within a {search.limit}: {best.figures.rate:,.1f} requests/s, at {level}."


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of(PROGRAM, lambda: _bench(parse(arguments)), ClientError)


def _bench(options: argparse.Namespace) -> int:
    rule = Rule(options.window, percentage=options.stability, most=options.windows)
    target = BenchTarget(options.protocol, Address.parse(options.url), dict(options.header), options.timeout)
    with ExitStack() as stack:
        server = _server(options, target, stack)
        plan = _prepared(options, target, server, stack)
        fleet = stack.enter_context(Fleet(plan, options.processes))
        session = Session(fleet, rule, options.warm_up, options.slo, count=lambda: _counted(server, options))
        with ProgressBar() as progress:
            search = _search(options)
            outcomes = _outcomes(session, options, search, lambda look: _show_progress(progress, look))
    table = [headings(outcomes), *(row(outcome) for outcome in outcomes)]
    told = list(remarks(outcomes, options.stability))
    if search is not None:
        told.insert(0, found(search))
    show_table(table[0], table[1:])
    for remark in told:
        show(remark)
    if options.json is not None:
        _write(options.json, report.render_json(options.model, outcomes, search))
    if options.csv is not None:
        _write(options.csv, report.render_csv(outcomes))
    if options.html is not None:
        _write(options.html, report.render_html(_heading(options, target), outcomes, table, told))
    return 0


def _search(options: argparse.Namespace) -> Search | None:
    if options.within is None:
        return None
    levels = _levels(options)
    return Search(options.within, levels[0], levels[-1])


def _outcomes(
    session: Session, options: argparse.Namespace, search: Search | None, tell: Callable[[ServerReading], None]
) -> list[LevelOutcome]:
    """Measure all levels, or those that a search wants; return what they showed, the lowest first."""
    if search is None:
        return list(session.run(_levels(options), tell))
    outcomes = []
    while search.next is not None:
        outcomes.append(session.measure(search.next, tell))
        search.add(outcomes[-1])
    return sorted(outcomes, key=lambda outcome: outcome.level.value)


def _levels(options: argparse.Namespace) -> list[LoadLevel]:
    if options.rate:
        return [LoadLevel(rate=rate, arrivals="poisson" if options.poisson else "constant") for rate in options.rate]
    return [LoadLevel(concurrency=count) for count in options.concurrency]


def _server(options: argparse.Namespace, target: BenchTarget, stack: ExitStack) -> BenchedServer:
    if target.protocol == "grpc":
        stack.enter_context(remedied("gRPC"))
        return GrpcServer(target.plan())
    return stack.enter_context(connected(options))


def _prepared(options: argparse.Namespace, target: BenchTarget, server: BenchedServer, stack: ExitStack) -> BenchPlan:
    if options.protocol == "openai":
        settings = dict(options.parameter)
        data = None if options.data == "random" else Path(options.data)
        return requests.prepared_prompts(
            requests.PromptLoad(options.model, options.prompt_words, data, settings), target
        )
    try:
        regions = stack.enter_context(BenchRegions(server)) if options.shared_memory else None
        return prepared_tensors(_wanted(options), target, server, regions)
    except Unreachable:
        raise
    except ClientError as error:
        raise ClientError("\n    ".join(filter(None, (str(error), _remedy(options, server))))) from error


def _remedy(options: argparse.Namespace, server: BenchedServer) -> str:
    """Return what to do where a model cannot be asked: name another, or another version, or have it loaded."""
    model = options.model
    try:
        entries = server.models()
    except ClientError:
        return ""
    versions = [entry for entry in entries if entry.name == model]
    if not versions:
        return did_you_mean(model, {entry.name for entry in entries})
    ready = [entry.version for entry in versions if entry.state == "READY"]
    if not ready:
        reasons = [line.strip() for entry in versions for line in entry.reason.splitlines() if line.strip(" .")]
        remedy = f"It is there, but it is not loaded. When that is mended: nerite client load {model}"
        return "\n    ".join([remedy, *reasons])
    return "" if options.version in ("", *ready) else f"Its versions: {', '.join(ready)}."


def _wanted(options: argparse.Namespace) -> TensorLoad:
    return TensorLoad(
        model=options.model,
        version=options.version,
        batch=options.batch,
        shapes=dict(options.shape),
        data=options.data if options.data in ("random", "zero") else Path(options.data),
        outputs=options.output,
        parameters=dict(options.parameter),
        streaming=options.streaming,
        sequence_length=options.sequence_length,
        first_id=options.first_sequence_id,
        output_room=options.output_shared_memory,
    )


def _counted(server: BenchedServer, options: argparse.Namespace) -> ModelStatistics | None:
    """Return what the server has counted; None if it does not tell."""
    try:
        versions = server.statistics(options.model, options.version)
    except ClientError:
        return None
    # The one that answers is the one that was asked last.
    return max(versions, key=lambda version: version.last_inference, default=None)


def _show_progress(progress: ProgressBar, look: ServerReading) -> None:
    what = f"{look.level.kind} {look.level}"
    if look.warming_up:
        progress.part(what, look.part, "warming up")
    else:
        rate = f", {look.rate:,.0f} requests/s" if look.rate else ""
        progress.part(what, look.part, f"window {look.windows + 1}{rate}")


def _heading(options: argparse.Namespace, target: BenchTarget) -> report.BenchHeading:
    settings = f"{options.protocol}, batches of {options.batch}, windows of {options.window:g} s"
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return report.BenchHeading(options.model, str(target.address), settings, when)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ClientError(f"the figures cannot be written to {path}: {error.strerror}") from None
