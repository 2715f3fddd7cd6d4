"""``nerite bench``: its command line, its steps, and the table and remarks that it prints."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from nerite.tools.bench.measurement import (
    AGREEING,
    MEASURES,
    QUANTILES,
    BenchPlan,
    BenchTarget,
    LoadLevel,
    Objective,
    Rule,
)
from nerite.tools.bench.requests import TensorLoad, prepared_tensors
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
from nerite.tools.client_infer import given_shape, parameter
from nerite.tools.connection import add_connection, connected, remedied

# Levels of load: a number, several, or a range.

_RANGE: Final = re.compile(r"([\d.]+):([\d.]+)(?::(\*?)([\d.]+))?")
_MAX_LEVELS: Final = 100


def numbers(text: str) -> tuple[float, ...]:
    """Parse ``8``, ``1,2,4``, ``1:32`` (all of them), ``1:32:4`` (in steps) or ``1:32:*2`` (doubling)."""
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
        raise argparse.ArgumentTypeError(f"'{text}': a load must be greater than 0")
    return tuple(found)


def counts(text: str) -> tuple[int, ...]:
    """Parse levels as ``numbers`` does, but only whole numbers."""
    found = numbers(text)
    if any(number % 1 for number in found):
        raise argparse.ArgumentTypeError(f"'{text}': numbers of concurrent requests must be whole numbers")
    return tuple(map(int, found))


def _range(first: float, last: float, times: bool, step: float) -> Iterator[float]:
    if first <= 0 or last < first or step <= (1 if times else 0):
        raise ValueError
    number = first
    # Stop after one more than the maximum, which is enough to detect that there are too many.
    for given in range(1, _MAX_LEVELS + 2):
        if number > last:
            return
        yield number
        number = number * step if times else first + given * step


# The options of ``nerite bench``.

PROGRAM = "nerite bench"
_EPILOG = """\
Works with any server that speaks KServe v2 over HTTP or gRPC, such as Nerite and Triton, or that offers OpenAI's chat
completions under /v1, such as vLLM.
LEVELS are a number, several (1,2,4), a range (1:8), a range in steps (1:32:4), or a doubling range (1:32:*2).
The figures are those of the last three windows, which must agree. Client is the CPU utilisation of the busiest process
of this program: near 100 %, the client is the bottleneck instead of the server.
The exit status is 0 for success, 1 if the server rejects requests or cannot be reached, 2 for an invalid command line,
130 after Ctrl-C.

Examples:
  nerite bench resnet
  nerite bench resnet --concurrency 1:64:*2 --html resnet.html
  nerite bench resnet --rate 100,5000 --within p99:20
  nerite bench resnet --protocol grpc --url gpu-3:8001 --rate 500,1000 --poisson
  nerite bench llama --protocol openai --rate 2 --parameter max_tokens=64 --slo ttft:300 --slo itl:50
"""
_DEFAULT_URLS = {"http": "localhost:8000", "grpc": "localhost:8001", "openai": "localhost:8000"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit if it is invalid."""
    parser = new_parser(PROGRAM, "Measure the throughput and latency of a model on a running server.", _EPILOG)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--version", default="", help="model version (default: chosen by the server)")
    _add_load(parser)
    _add_data(parser)
    add_repeated(
        add_measurement(parser),
        "--slo",
        "MEASURE:MS",
        "count responses that meet an objective: latency, ttft (time to first token) or itl (inter-token "
        "latency) of at most MS",
        _objective,
    )
    _add_results(parser)
    add_connection(parser, url="")
    parser.add_argument(
        "--protocol",
        choices=tuple(_DEFAULT_URLS),
        default="http",
        help="protocol (default: http); grpc uses port 8001, openai streams chat completions",
    )
    options = parser.parse_args(arguments)
    _check(parser, options)
    options.url = options.url or _DEFAULT_URLS[options.protocol]
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Reject combinations of options that have no effect or meaning."""
    if options.shared_memory and options.streaming and options.protocol == "http":
        parser.error("--shared-memory does not work with generate_stream: use --protocol grpc")
    if options.output_shared_memory and not options.shared_memory:
        parser.error("--output-shared-memory requires --shared-memory")
    if options.protocol == "openai" and (options.sequence_length or options.shared_memory or options.data == "zero"):
        parser.error("--protocol openai supports neither sequences nor shared memory, and its only data are prompts")
    if options.within is not None:
        levels = options.rate or options.concurrency
        if len(levels) < 2 or levels[0] >= levels[-1]:
            parser.error("--within searches between a low and a high load: write --rate 100,5000")
    if options.poisson and not options.rate:
        parser.error("--poisson requires --rate: concurrent requests are sent when responses arrive, not on a schedule")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    load = group.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        metavar="LEVELS",
        type=counts,
        default=(1,),
        help="number of concurrent requests (default: 1)",
    )
    load.add_argument(
        "--rate", metavar="LEVELS", type=numbers, help="requests per second, sent regardless of responses"
    )
    poisson = "with --rate: send at random times (Poisson process), as independent clients would"
    group.add_argument("--poisson", action="store_true", help=poisson)
    group.add_argument(
        "--within",
        metavar="MEASURE:MS",
        type=_limit,
        help="find the highest load between the first and the last of LEVELS at which the latency is at most MS; "
        "MEASURE is mean, p50, p90, p95, p99 or p99.9",
    )
    processes = "number of processes that generate the load (default: 1)"
    group.add_argument("--processes", metavar="N", type=positive_integer, default=1, help=processes)


def add_tensors(group: argparse._ArgumentGroup) -> None:
    """Add the options for inputs."""
    group.add_argument(
        "--batch", metavar="N", type=positive_integer, default=1, help="batch size of a request (default: 1)"
    )
    shape = "shape of an input, without the batch, such as pixels:3,224,224 (default: 1 for variable dimensions)"
    add_repeated(group, "--shape", "INPUT:SIZES", shape, given_shape)
    group.add_argument(
        "--data",
        metavar="SOURCE",
        default="random",
        help="random (default), zero, a JSON file in perf_analyzer's format, or a directory with a file for each input",
    )


def add_requests(group: argparse._ArgumentGroup) -> None:
    """Add the other options for requests."""
    add_repeated(group, "--parameter", "NAME=VALUE", "a parameter of each request, such as max_tokens=64", parameter)
    streaming = "stream responses: generate_stream over HTTP, ModelStreamInfer over gRPC"
    group.add_argument("--streaming", action="store_true", help=streaming)
    group.add_argument(
        "--sequence-length",
        metavar="N",
        type=positive_integer,
        default=0,
        help="send sequences of N requests; each of the concurrent requests belongs to a different sequence",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    add_tensors(group)
    add_requests(group)
    words = "with --protocol openai: length of generated prompts in words (default: 100)"
    group.add_argument("--prompt-words", metavar="N", type=positive_integer, default=100, help=words)
    ids = "first sequence id (default: 1)"
    group.add_argument("--first-sequence-id", metavar="N", type=positive_integer, default=1, help=ids)
    memory = "pass inputs in system shared memory; the server must run on this machine"
    group.add_argument("--shared-memory", action="store_true", help=memory)
    room = "with --shared-memory: also return outputs there, with room for BYTES each"
    group.add_argument("--output-shared-memory", metavar="BYTES", type=positive_integer, default=0, help=room)
    add_repeated(group, "--output", "NAME", "return only this output")


def add_measurement(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options for the measurement; return their group."""
    group = parser.add_argument_group("measurement")
    rule = Rule()
    group.add_argument(
        "--warm-up", metavar="SECONDS", type=float, default=1.0, help="initial time that is not measured (default: 1)"
    )
    window = f"length of a window; one with few requests is extended (default: {rule.seconds:g})"
    group.add_argument("--window", metavar="SECONDS", type=float, default=rule.seconds, help=window)
    stability = f"maximum deviation of three windows from their mean (default: {rule.percentage:g})"
    group.add_argument("--stability", metavar="PERCENT", type=float, default=rule.percentage, help=stability)
    most = f"maximum number of windows, even if none agree (default: {rule.most})"
    group.add_argument("--windows", metavar="N", type=positive_integer, default=rule.most, help=most)
    return group


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--json", metavar="FILE", type=Path, help="write all figures as JSON")
    group.add_argument("--csv", metavar="FILE", type=Path, help="write a line for each level")
    group.add_argument("--html", metavar="FILE", type=Path, help="write a self-contained HTML page with plots")


def _objective(text: str) -> Objective:
    return Objective(*_bound(text, MEASURES, "objective", "ttft:200"))


def _limit(text: str) -> LatencyLimit:
    return LatencyLimit(*_bound(text, ("mean", *QUANTILES), "limit", "p99:20"))


def _bound(text: str, measures: Collection[str], kind: str, example: str) -> tuple[str, float]:
    measure, _, most = text.partition(":")
    try:
        milliseconds = float(most)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a valid {kind}: write {example}") from None
    if measure not in measures:
        near = did_you_mean(measure, measures) or f"Measures: {', '.join(measures)}."
        raise argparse.ArgumentTypeError(f"unknown measure '{measure}'. {near}")
    return measure, milliseconds


# Output: a table with a row for each level of load, and remarks.


def headings(outcomes: Sequence[LevelOutcome]) -> list[str]:
    """Return the headings, without columns that would be empty."""
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
    """Return the row of a level."""
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
    """Yield the remarks below the table."""
    if any(not outcome.stable for outcome in outcomes):
        yield (
            f"~ not stable: the last {AGREEING} windows differ by more than {percentage:g} % from their mean. "
            "A longer --window may help."
        )
    if any(outcome.client_is_the_limit for outcome in outcomes):
        yield (
            "! the client was the bottleneck: one of its processes was saturated, or sent requests late. "
            "Use more --processes, or run it on another machine."
        )
    for outcome in outcomes:
        if outcome.level.open and outcome.figures.rate < KEPT_UP * outcome.level.rate:
            yield f"The server did not keep up with {outcome.level}: latencies grow as long as the load lasts."
        for reason, count in outcome.figures.failures.items():
            yield f"{count} failed at {outcome.level}: {reason}"


def found(search: Search) -> str:
    """Return the result of a search for the highest load within a limit."""
    best = search.best
    if best is None:
        return f"No load was within a {search.limit}: start lower, or raise the limit."
    level = f"{best.level.kind} {best.level}"
    return f"Within a {search.limit}: {best.figures.rate:,.1f} requests/s, at {level}."


def run(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    return status_of(PROGRAM, lambda: _bench(parse(arguments)), ClientError)


def _bench(options: argparse.Namespace) -> int:
    target = BenchTarget(options.protocol, Address.parse(options.url), dict(options.header), options.timeout)
    with ExitStack() as stack:
        server = _server(options, target, stack)
        plan = _prepared(options, target, server, stack)
        fleet = stack.enter_context(Fleet(plan, options.processes))
        session = Session(
            fleet, rule_of(options), options.warm_up, options.slo, count=lambda: _counted(server, options)
        )
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
        write_file(options.json, report.render_json(options.model, outcomes, search))
    if options.csv is not None:
        write_file(options.csv, report.render_csv(outcomes))
    if options.html is not None:
        write_file(options.html, report.render_html(_heading(options, target), outcomes, table, told))
    return 0


def _search(options: argparse.Namespace) -> Search | None:
    if options.within is None:
        return None
    levels = _levels(options)
    return Search(options.within, levels[0], levels[-1])


def _outcomes(
    session: Session, options: argparse.Namespace, search: Search | None, tell: Callable[[ServerReading], None]
) -> list[LevelOutcome]:
    """Measure all levels, or those that a search selects; return the outcomes, lowest level first."""
    if search is None:
        return [session.measure(level, tell) for level in _levels(options)]
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
        return GrpcServer(target)
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
        wanted = replace(
            tensor_load(options, options.model),
            version=options.version,
            outputs=options.output,
            first_id=options.first_sequence_id,
            output_room=options.output_shared_memory,
        )
        return prepared_tensors(wanted, target, server, regions)
    except Unreachable:
        raise
    except ClientError as error:
        raise ClientError("\n    ".join(filter(None, (str(error), _remedy(options, server))))) from error


def _remedy(options: argparse.Namespace, server: BenchedServer) -> str:
    """Return a remedy for a model that cannot be queried: another name or version, or loading it."""
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
        remedy = f"It exists but is not loaded. Fix the cause, then: nerite client load {model}"
        return "\n    ".join([remedy, *reasons])
    return "" if options.version in ("", *ready) else f"Its versions: {', '.join(ready)}."


def tensor_load(options: argparse.Namespace, model: str) -> TensorLoad:
    """Return the requests to send to a model, from the options of ``add_tensors`` and ``add_requests``."""
    return TensorLoad(
        model,
        batch=options.batch,
        shapes=dict(options.shape),
        data=options.data if options.data in ("random", "zero") else Path(options.data),
        parameters=dict(options.parameter),
        streaming=options.streaming,
        sequence_length=options.sequence_length,
    )


def rule_of(options: argparse.Namespace) -> Rule:
    """Return the rule for windows, from the options of ``add_measurement``."""
    return Rule(options.window, percentage=options.stability, most=options.windows)


def _counted(server: BenchedServer, options: argparse.Namespace) -> ModelStatistics | None:
    """Return the server's statistics of the model, or None if it does not report them."""
    try:
        versions = server.statistics(options.model, options.version)
    except ClientError:
        return None
    # The version that answers is the one with the latest request.
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


def write_file(path: Path, text: str) -> None:
    """Write a file, which may be a device such as /dev/stdout. Raises ``ClientError``."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror}") from None
