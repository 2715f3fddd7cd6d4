"""The command line of ``nerite bench``, and what its options ask for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from nerite.cli.command import add_repeated, did_you_mean, new_parser, positive_integer, positive_number
from nerite.client import ClientError
from nerite.tools.bench.conversations import PATHS, STREAMED, PromptLoad
from nerite.tools.bench.measurement import MEASURES, QUANTILES, Arrivals, LoadLevel, Objective, Rule
from nerite.tools.bench.planning import DISTRIBUTIONS, NONE, ONE, CancelPlan, Distribution, Workload
from nerite.tools.bench.provenance import command_line
from nerite.tools.bench.replay import TracedRequest, read_trace
from nerite.tools.bench.requests import TensorLoad
from nerite.tools.bench.session import LatencyLimit
from nerite.tools.client_infer import parameter
from nerite.tools.connection import add_connection
from nerite.tools.trial_inputs import add_shape_option

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
_EPILOG = f"""\
Works with any server that speaks KServe v2 over HTTP or gRPC, such as Nerite and Triton, or that offers OpenAI's API
under /v1, such as vLLM. To compare reports: nerite bench compare A.json B.json (a model of that name: -- compare).
LEVELS are a number, several (1,2,4), a range (1:8), a range in steps (1:32:4), or a doubling range (1:32:*2).
DIST is {DISTRIBUTIONS} (a number in each line).
The figures are those of the last three windows, which must agree. Client is the CPU utilisation of the busiest process
of this program: near 100 %, the client is the bottleneck instead of the server.
The exit status is 0 for success, 1 if the server rejects requests or cannot be reached, 2 for an invalid command line,
130 after Ctrl-C.

Examples:
  nerite bench resnet
  nerite bench resnet --concurrency 1:64:*2 --html resnet.html
  nerite bench resnet --rate 100,5000 --within p99:20
  nerite bench resnet --protocol grpc --url gpu-3:8001 --rate 500,1000 --poisson
  nerite bench llama --protocol openai --rate 2 --output-length 64 --slo ttft:300 --slo itl:50
  nerite bench llama --protocol openai --turns uniform:2,6 --think-time exponential:5 --system-length 500
  nerite bench llama --protocol openai --replay trace.jsonl --speed 2
  nerite bench bge --protocol openai --endpoint embeddings --texts 8 --input-length lognormal:120,80
"""
_DEFAULT_URLS = {"http": "localhost:8000", "grpc": "localhost:8001", "openai": "localhost:8000"}
_PROMPT_WORDS: Final = 100


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit if it is invalid."""
    parser = new_parser(PROGRAM, "Measure the throughput and latency of a model on a running server.", _EPILOG)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--version", default="", help="model version (default: chosen by the server)")
    parser.add_argument(
        "--protocol",
        choices=tuple(_DEFAULT_URLS),
        default="http",
        help="protocol (default: http); grpc uses port 8001, openai is OpenAI's API",
    )
    _add_load(parser)
    _add_data(parser)
    _add_prompts(parser)
    _add_cancellations(parser)
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
    options = parser.parse_args(arguments)
    _check(parser, options)
    options.url = options.url or _DEFAULT_URLS[options.protocol]
    options.command = command_line(PROGRAM, arguments)
    return options


# Combinations of options that have no effect or meaning are refused.

_TENSORS: Final = (
    "version", "batch", "shape", "streaming", "sequence_length", "first_sequence_id", "shared_memory",
    "output_shared_memory", "output",
)  # fmt: skip
_PROMPTS: Final = (
    "endpoint", "prompt_words", "input_length", "output_length", "turns", "think_time", "system_length",
    "system_share", "adapter", "texts", "query_length",
)  # fmt: skip
_OF_ENDPOINTS: Final = {
    "turns": ("chat",),
    "think_time": ("chat",),
    "system_length": ("chat",),
    "system_share": ("chat",),
    "output_length": STREAMED,
    "adapter": STREAMED,
    "texts": ("embeddings", "rerank", "score"),
    "query_length": ("rerank", "score"),
    "data": ("chat", "completions", "embeddings"),
}
"""Options that only some endpoints have."""
_NEEDS: Final = (
    ("output_shared_memory", "shared_memory", ""),
    ("think_time", "turns", "there is nothing to think about between other requests"),
    ("system_share", "system_length", ""),
    ("cancel_after", "cancel_rate", ""),
    ("metrics_url", "cancel_rate", "the metrics are read for its cancellations only"),
    ("speed", "replay", ""),
    ("poisson", "rate", "concurrent requests are sent when responses arrive, not on a schedule"),
    ("burstiness", "rate", "concurrent requests are sent when responses arrive, not on a schedule"),
)
"""An option, another that it needs, and why if that is not obvious."""
_WHOLE: Final = "is measured as a whole, from the first request to the last answer"
_EXCLUDED: Final = (
    ("poisson", ("burstiness",), "is --burstiness 1"),
    ("input_length", ("prompt_words", "data"), "determines the length of the prompts"),
    ("data", ("prompt_words", "turns", "texts"), "determines the prompts, of one request each"),
    ("cancel_rate", ("sequence_length",), "would leave sequences open on the server"),
    ("replay", ("ramp", "requests", "within"), "determines the load"),
    ("replay", ("warm_up", "stability", "windows"), _WHOLE),
    ("replay", ("turns", "sequence_length"), "sends single requests at the recorded times"),
    ("requests", ("within", "ramp", "warm_up", "stability", "windows"), _WHOLE),
    ("requests", ("sequence_length",), "would leave sequences open on the server"),
)
"""An option, others that it excludes, and why."""


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    def given(name: str) -> bool:
        return bool(getattr(options, name) != parser.get_default(name))

    def flag(name: str) -> str:
        return f"--{name.replace('_', '-')}"

    openai = options.protocol == "openai"
    for name in _TENSORS if openai else _PROMPTS:
        if given(name):
            where = "http or grpc" if openai else "openai"
            parser.error(f"{flag(name)} does not apply to --protocol {options.protocol}: use --protocol {where}")
    if openai:
        for name, endpoints in _OF_ENDPOINTS.items():
            if given(name) and options.endpoint not in endpoints:
                wanted = " or ".join(endpoints)
                parser.error(f"{flag(name)} does not apply to --endpoint {options.endpoint}, only to {wanted}")
        if options.data == "zero":
            parser.error("--data zero does not apply to --protocol openai: its only data are prompts")
        if options.endpoint not in STREAMED and any(objective.measure != "latency" for objective in options.slo):
            parser.error(f"--endpoint {options.endpoint} generates no tokens: its only objective is --slo latency:MS")
    for name, needed, why in _NEEDS:
        if given(name) and not given(needed):
            parser.error(f"{flag(name)} requires {flag(needed)}{f': {why}' if why else ''}")
    for name, others, why in _EXCLUDED:
        for other in others:
            if given(name) and given(other):
                parser.error(f"{flag(name)} {why}: leave out {flag(other)}")
    if options.shared_memory and options.streaming and options.protocol == "http":
        parser.error("--shared-memory does not work with generate_stream: use --protocol grpc")
    if options.within is not None:
        levels = options.rate or options.concurrency
        if len(levels) < 2 or levels[0] >= levels[-1]:
            parser.error("--within searches between a low and a high load: write --rate 100,5000")


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
    load.add_argument(
        "--replay",
        metavar="FILE",
        type=Path,
        help="send the requests of a trace at their recorded times: lines of JSON with timestamp, input_length, "
        "output_length and hash_ids, or a trace file of the server",
    )
    poisson = "with --rate: send at random times (Poisson process), as independent clients would"
    group.add_argument("--poisson", action="store_true", help=poisson)
    group.add_argument(
        "--burstiness",
        metavar="SHAPE",
        type=positive_number,
        help="with --rate: send at times whose gaps have a gamma distribution of this shape; 1 is --poisson, less "
        "makes bursts",
    )
    speed = "with --replay: factor by which the recorded times are shortened (default: 1)"
    group.add_argument("--speed", metavar="FACTOR", type=positive_number, default=1.0, help=speed)
    ramp = "time in which the load grows to its level, before the warm-up (default: 0)"
    group.add_argument("--ramp", metavar="SECONDS", type=positive_number, default=0.0, help=ramp)
    group.add_argument(
        "--requests",
        metavar="N",
        type=positive_integer,
        help="send N requests (with --turns: conversations), and measure all of them instead of windows",
    )
    seed = "seed of everything that is random: equal seeds give equal loads (default: 0)"
    group.add_argument("--seed", metavar="N", type=int, default=0, help=seed)
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
    add_shape_option(group)
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
    ids = "first sequence id (default: 1)"
    group.add_argument("--first-sequence-id", metavar="N", type=positive_integer, default=1, help=ids)
    memory = "pass inputs in system shared memory; the server must run on this machine"
    group.add_argument("--shared-memory", action="store_true", help=memory)
    room = "with --shared-memory: also return outputs there, with room for BYTES each"
    group.add_argument("--output-shared-memory", metavar="BYTES", type=positive_integer, default=0, help=room)
    add_repeated(group, "--output", "NAME", "return only this output")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    about = "--data FILE has prompts here, one in each line."
    group = parser.add_argument_group("requests of --protocol openai", about)

    def lengths(name: str, meaning: str) -> None:
        group.add_argument(name, metavar="DIST", type=_distribution, help=meaning)

    group.add_argument("--endpoint", choices=tuple(PATHS), default="chat", help="below /v1 (default: chat)")
    words = f"length of generated texts in words (default: {_PROMPT_WORDS})"
    group.add_argument("--prompt-words", metavar="N", type=positive_integer, help=words)
    lengths("--input-length", "length of generated texts in tokens; two requests first tell how many a word has")
    lengths("--output-length", "length of the responses in tokens, as max_tokens with ignore_eos")
    lengths("--turns", "number of requests of a conversation, each of which is sent after the former response")
    lengths("--think-time", "seconds from a response to the next request of the conversation")
    system = "length of a system prompt in tokens"
    group.add_argument("--system-length", metavar="N", type=positive_integer, default=0, help=system)
    share = "part of the conversations that have the same system prompt; others have their own (default: 1)"
    group.add_argument("--system-share", metavar="PART", type=_part, default=1.0, help=share)
    mixed = "send conversations to these models or adapters instead of MODEL, by weight"
    add_repeated(group, "--adapter", "NAME:WEIGHT", mixed, _weighted)
    lengths("--texts", "number of texts of a request to embeddings, rerank or score (default: 1)")
    lengths("--query-length", "length of the query of a request to rerank or score in tokens (default: 16)")


def _add_cancellations(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cancellations")
    rate = "cancel this part of the requests, by closing the connection or the gRPC call; counted separately"
    group.add_argument("--cancel-rate", metavar="PERCENT", type=_percent, default=0.0, help=rate)
    after = "seconds from the sending of a request to its cancellation (default: 0.5)"
    group.add_argument("--cancel-after", metavar="DIST", type=_distribution, help=after)
    url = "metrics of the server, to compare its count of cancellations (default: the HTTP port)"
    group.add_argument("--metrics-url", metavar="URL", default="", help=url)


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


def _distribution(text: str) -> Distribution:
    try:
        return Distribution.parse(text)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _percent(text: str) -> float:
    return _between(text, 100.0)


def _part(text: str) -> float:
    return _between(text, 1.0)


def _between(text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to {most:g}")
    return value


def _weighted(text: str) -> tuple[str, float]:
    name, colon, weight = text.rpartition(":")
    try:
        value = float(weight) if colon else 0.0
    except ValueError:
        value = 0.0
    if not name or not value > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a name with a weight: write poet:3")
    return name, value


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


# What the options ask for.


def levels_of(options: argparse.Namespace, trace: Sequence[TracedRequest]) -> list[LoadLevel]:
    """Return the levels of load; of a trace one, with its mean rate."""
    if trace:
        seconds = (trace[-1].at - trace[0].at) / options.speed
        return [LoadLevel(rate=len(trace) / (seconds or 1.0), arrivals="replay")]
    if options.rate:
        shape = 1.0 if options.poisson else options.burstiness
        arrivals: Arrivals = "poisson" if options.poisson else "gamma" if shape else "constant"
        return [LoadLevel(rate=rate, arrivals=arrivals, burstiness=shape or 1.0) for rate in options.rate]
    return [LoadLevel(concurrency=count) for count in options.concurrency]


def trace_of(options: argparse.Namespace) -> Sequence[TracedRequest]:
    """Return the requests to replay, if any. Raises ``ClientError`` if they do not fit other options."""
    if options.replay is None:
        return ()
    trace = read_trace(options.replay, options.model)
    path = options.replay
    if any(traced.input_tokens or traced.text for traced in trace):
        if options.protocol != "openai":
            raise ClientError(f"{path} has lengths of prompts in tokens: replay it with --protocol openai")
        if options.endpoint in ("rerank", "score"):
            raise ClientError(f"{path} has single prompts: replay it with another --endpoint than {options.endpoint}")
        for name in ("input_length", "prompt_words", "texts"):
            if getattr(options, name) is not None:
                raise ClientError(f"{path} has the prompts or their lengths: leave out --{name.replace('_', '-')}")
        if options.data != "random":
            raise ClientError(f"{path} has the prompts or their lengths: leave out --data")
    if any(traced.output_tokens for traced in trace):
        if options.output_length is not None:
            raise ClientError(f"{path} has the lengths of responses: leave out --output-length")
        if options.protocol == "openai" and options.endpoint not in STREAMED:
            raise ClientError(f"{path} has lengths of responses: replay it with --endpoint chat or completions")
    return trace


def cancel_plan(options: argparse.Namespace) -> CancelPlan | None:
    """Return which requests the client cancels."""
    if not options.cancel_rate:
        return None
    return CancelPlan(options.cancel_rate / 100, options.cancel_after or Distribution("fixed", (0.5,)))


def prompt_load(options: argparse.Namespace, trace: Sequence[TracedRequest]) -> PromptLoad:
    """Return the requests to send to the OpenAI API."""
    words = Distribution("fixed", (float(options.prompt_words or _PROMPT_WORDS),))
    pairs = options.endpoint in ("rerank", "score")
    workload = Workload(
        options.input_length or words,
        options.output_length,
        options.texts or ONE,
        (options.query_length or Distribution("fixed", (16.0,))) if pairs else None,
        options.turns or ONE,
        options.think_time or NONE,
        options.system_share,
        dict(options.adapter) or {options.model: 1.0},
        cancel_plan(options),
        options.seed,
    )
    has_lengths = any(traced.input_tokens for traced in trace)
    in_words = not (options.input_length or options.query_length or options.system_length or has_lengths)
    return PromptLoad(
        options.endpoint,
        workload,
        in_words,
        options.system_length,
        None if options.data == "random" else Path(options.data),
        trace,
        dict(options.parameter),
        0 if options.input_length or has_lengths else options.prompt_words or _PROMPT_WORDS,
    )
