"""What ``nerite top`` does: looks at the server, shows what happened, and obeys keys."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Final, NamedTuple

from nerite.cli.command import new_parser, show, show_json, status_of, write
from nerite.client import Client, ClientError, ModelVersion
from nerite.client.connection import Address, Unreachable
from nerite.client.models import MetricsPage, quantile
from nerite.tools.client import add_connection, connected

# What happened between two looks at a server: one line for each version of a model, and one for all.


class ServerSample(NamedTuple):
    """A server at one moment."""

    at: float
    """Seconds."""
    models: Sequence[ModelVersion]
    metrics: MetricsPage


@dataclass(frozen=True)
class VersionActivity:
    """Of one version of a model. None: the server does not tell."""

    model: str
    version: str
    state: str
    requests: float | None = None
    """Answered a second."""
    failures: float | None = None
    median: float | None = None
    """Seconds."""
    slowest: float | None = None
    """Seconds that 99 of 100 do not exceed."""
    waiting: float | None = None
    """Requests that are in the queue now."""
    batch: float | None = None
    """Rows that ran together, on average."""
    tokens: float | None = None
    """Generated a second, by a language model."""
    memory: float | None = None
    """Bytes."""
    restarts: float | None = None
    """Of workers, since the model was loaded."""


ORDERS: Final[Mapping[str, Callable[[VersionActivity], float]]] = {
    "requests": lambda each: each.requests or 0.0,
    "failures": lambda each: each.failures or 0.0,
    "p99": lambda each: each.slowest or 0.0,
    "queue": lambda each: each.waiting or 0.0,
    "memory": lambda each: each.memory or 0.0,
}
"""By what lines may be sorted, the largest first, beside the name."""


def ordered_activity(happened: Iterable[VersionActivity], by: str) -> list[VersionActivity]:
    """Return the lines in an order, and by name where that says nothing."""
    named = sorted(happened, key=lambda each: (each.model, each.version))
    return sorted(named, key=ORDERS[by], reverse=True) if by in ORDERS else named


def activity_between(before: ServerSample, after: ServerSample) -> list[VersionActivity]:
    """Return what happened from one look to the next, of everything that is in the index at the second."""
    return [_of(version, before, after) for version in after.models]


def _of(version: ModelVersion, before: ServerSample, after: ServerSample) -> VersionActivity:
    seconds = after.at - before.at
    labels = {"model": version.name, "version": version.version}

    def now(name: str) -> float | None:
        return after.metrics.total(name, **labels)

    def more(name: str) -> float | None:
        """Return by how much a counter has grown: from nothing, where the model was loaded meanwhile."""
        counted, earlier = now(name), before.metrics.total(name, **labels) or 0.0
        return None if counted is None else counted - earlier if counted >= earlier else counted

    def rate(name: str) -> float | None:
        grown = more(name)
        return None if grown is None else grown / seconds

    took = _grown(*(look.metrics.buckets("nerite_request_duration_seconds", **labels) for look in (before, after)))
    rows, batches = more("nv_inference_count"), more("nv_inference_exec_count")
    return VersionActivity(
        version.name,
        version.version,
        version.state,
        rate("nv_inference_request_success"),
        rate("nv_inference_request_failure"),
        quantile(took, 0.5),
        quantile(took, 0.99),
        now("nv_inference_pending_request_count"),
        rows / batches if rows and batches else None,
        rate("vllm:generation_tokens_total"),
        now("nerite_model_memory_bytes"),
        now("nerite_worker_restarts_total"),
    )


def _grown(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    if max(before.values(), default=0.0) > max(after.values(), default=0.0):  # the model was loaded anew
        before = {}
    return {bound: count - before.get(bound, 0.0) for bound, count in after.items()}


def total_activity(happened: Sequence[VersionActivity], look: ServerSample) -> dict[str, float | None]:
    """Return what is said of the server: sums over its models, and the machine's share in use."""

    def total(part: Callable[[VersionActivity], float | None]) -> float:
        return sum(part(each) or 0.0 for each in happened)

    used, there = look.metrics.total("nv_cpu_memory_used_bytes"), look.metrics.total("nv_cpu_memory_total_bytes")
    return {
        "requests": total(lambda each: each.requests),
        "failures": total(lambda each: each.failures),
        "waiting": total(lambda each: each.waiting),
        "processors": look.metrics.total("nv_cpu_utilization"),
        "memory": used / there if used is not None and there else None,
    }


# A terminal that gives each key at once, on a screen that goes away without a trace.

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"


class Keyboard:
    """Enters the screen with ``with``, and leaves it however that ends."""

    def __enter__(self) -> Keyboard:
        self._descriptor = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        write(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        write(_LEAVE)
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def key(self, seconds: float) -> str:
        """Wait for a key at most so long; return it, or nothing."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._descriptor], [], [], left)[0]:
                pressed = os.read(self._descriptor, 1).decode(errors="ignore")
                return pressed or "q"  # nobody is there any more
        return ""


# What ``nerite top`` shows: text that fits a terminal, made of what happened.

KEYS: Final = {"n": "name", "r": "requests", "f": "failures", "l": "p99", "w": "queue", "m": "memory"}
"""What sorts the lines, by the key that asks for it."""
_NOTHING: Final = "-"


def _count(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _milliseconds(value: float | None) -> str:
    return _NOTHING if value is None else f"{value * 1000:,.0f}" if value >= 0.1 else f"{value * 1000:.2f}"


def _bytes(value: float | None) -> str:
    if not value:
        return _NOTHING
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def _part(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


_COLUMNS: Final[Mapping[str, Callable[[VersionActivity], str]]] = {
    "Model": lambda each: each.model,
    "Version": lambda each: each.version,
    "State": lambda each: each.state or "not loaded",
    "Requests/s": lambda each: _count(each.requests),
    "Failures/s": lambda each: _count(each.failures),
    "p50 ms": lambda each: _milliseconds(each.median),
    "p99 ms": lambda each: _milliseconds(each.slowest),
    "Queue": lambda each: _count(each.waiting),
    "Batch": lambda each: _count(each.batch),
    "Tokens/s": lambda each: _count(each.tokens),
    "Memory": lambda each: _bytes(each.memory),
    "Restarts": lambda each: _count(each.restarts),
}
_WORDS: Final = 3
"""Columns that begin with words, and stand at the left."""


def table(happened: Sequence[VersionActivity]) -> list[str]:
    """Return a line of headings, and one for each version. Names have as much room as the longest needs."""
    rows = [list(_COLUMNS), *([cell(each) for cell in _COLUMNS.values()] for each in happened)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place < _WORDS else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def summary(server: str, whole: Mapping[str, float | None]) -> str:
    """Return the line about the server."""
    return (
        f"{server}   {_count(whole['requests'])} requests/s, {_count(whole['failures'])} failures/s, "
        f"{_count(whole['waiting'])} waiting   machine: processors {_part(whole['processors'])}, "
        f"memory {_part(whole['memory'])}"
    )


def frame(
    server: str,
    whole: Mapping[str, float | None],
    lines: Sequence[str],
    size: tuple[int, int],
    by: str,
    lost: str = "",
) -> str:
    """Return a screen of ``size`` columns and rows, with its escape sequences. ``lines`` are those of ``table``.

    ``lost``: why the server could not be asked, and all of this is what was seen before.
    """
    width, height = size
    keys = "  ".join(f"{key} {name}" for key, name in KEYS.items())
    room = max(height - 5, 1)
    head, *rows = lines
    hidden = len(rows) - room
    if hidden > 0:
        rows = [
            *rows[: room - 1],
            f"... and {hidden + 1} more: a taller window shows them, or a name after 'nerite top'",
        ]
    shown = [
        summary(server, whole)[:width],
        f"as it was: {lost}"[:width] if lost else "",
        f"\x1b[7m{head[:width]:<{width}}\x1b[0m",
        *(row[:width] for row in rows),
        *[""] * (room - len(rows)),
        "",
        f"sorted by {by}   q quit  {keys}"[:width],
    ]
    return "\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in shown)


_PROGRAM: Final = "nerite top"
_METRICS_PORT: Final = 8002
_FIRST: Final = 0.3
"""Seconds until there is something to see."""
_EPILOG: Final = """\
Keys: q ends, n r f l w m sort by name, requests, failures, p99, queue, memory.
Without a terminal, or with --once, it looks twice and prints a table.

It reads the repository index and the page of metrics, so it works with Triton as well, but for what only Nerite tells:
percentiles, memory and restarts. `nerite client watch` needs no metrics, and writes lines for a log.

Examples:
  nerite top
  nerite top resnet --sort p99
  nerite top --url gpu-3:8000 --once --json
"""


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of(_PROGRAM, lambda: _top(_parse(arguments)), ClientError)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(_PROGRAM, "Show what a running server does, once a second.", _EPILOG)
    parser.add_argument("model", metavar="NAME", nargs="?", default="", help="only models with this in their names")
    parser.add_argument("--interval", metavar="SECONDS", type=_seconds, default=1.0, help="default: 1")
    parser.add_argument("--sort", choices=("name", *ORDERS), default="requests", help="default: requests")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--json", action="store_true", help="with --once: a list with all figures")
    add_connection(parser, url="localhost:8000")
    parser.add_argument(
        "--metrics-url", metavar="URL", default="", help=f"of the page of metrics (default: port {_METRICS_PORT})"
    )
    return parser.parse_args(list(arguments))


def _seconds(text: str) -> float:
    seconds = float(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait")
    return seconds


def _top(options: argparse.Namespace) -> int:
    address = Address.parse(options.url)
    metrics = Address.parse(options.metrics_url) if options.metrics_url else address._replace(port=_METRICS_PORT)
    with (
        connected(options) as client,
        Client(str(metrics), headers=dict(options.header), timeout=options.timeout) as counted,
    ):
        window = _Window(client, counted, options)
        if options.once or options.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            window.once()
        else:
            window.stay(str(address))
    return 0


class _Window:
    """The server as it is seen."""

    def __init__(self, client: Client, metrics: Client, options: argparse.Namespace) -> None:
        self._client = client
        self._metrics = metrics
        self._options = options
        self._sort: str = options.sort

    def once(self) -> None:
        """Print what happens in one interval."""
        first = self._look()
        time.sleep(self._options.interval)
        happened = self._between(first, self._look())
        if self._options.json:
            show_json([asdict(each) for each in happened])
        else:
            show("\n".join(table(happened)))

    def stay(self, server: str) -> None:
        """Show it until whoever looks wants no more."""
        before = after = self._look()
        lost = ""
        with Keyboard() as keyboard, contextlib.suppress(KeyboardInterrupt):
            pressed = keyboard.key(min(self._options.interval, _FIRST))
            while pressed != "q":
                self._sort = KEYS.get(pressed, self._sort)
                if not pressed:
                    try:
                        before, after, lost = after, self._look(), ""
                    except ClientError as error:  # it may come back: what was last seen stays, and the reason
                        lost = str(error).partition("\n")[0]
                if after.at > before.at:
                    happened = self._between(before, after)
                    size = shutil.get_terminal_size()
                    write(
                        frame(
                            server,
                            total_activity(happened, after),
                            table(happened),
                            (size[0], size[1]),
                            self._sort,
                            lost,
                        )
                    )
                pressed = keyboard.key(self._options.interval)

    def _between(self, before: ServerSample, after: ServerSample) -> list[VersionActivity]:
        return ordered_activity(activity_between(before, after), self._sort)

    def _look(self) -> ServerSample:
        models = [each for each in self._client.models() if self._options.model in each.name]
        try:
            return ServerSample(time.monotonic(), models, self._metrics.metrics())
        except Unreachable as error:
            remedy = "Its metrics should be there. Say where they are with --metrics-url HOST:PORT."
            raise ClientError(f"{error}\n    {remedy}") from error
