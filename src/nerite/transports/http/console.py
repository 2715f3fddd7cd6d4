"""The console under ``/ui``: static files, and the data that only the console needs."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl

import orjson

from nerite.config.open_ports import open_ports, remedy
from nerite.config.options import METRICS_CATEGORY, ServerOptions
from nerite.core.client_text import checked_name
from nerite.core.errors import Forbidden, InvalidArgument
from nerite.core.work_loop import WorkLoop
from nerite.observability.metrics_history import INTERVAL, SAMPLES, MetricsHistory, VersionReading
from nerite.observability.recent_log import LEVELS, RecentLog
from nerite.transports import access
from nerite.transports.access import Lock
from nerite.transports.http import reply
from nerite.transports.http.handler import BackgroundCalls, HttpExchange, LoopTurns
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.openapi import sample_inputs
from nerite.transports.http.reply import Reply
from nerite.transports.http.web_pages import CONSOLE_PATH, NO_STORE

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_CONSOLE_FOLDER: Final = Path(__file__).with_name("pages") / "console"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Content types by suffix. Files with other suffixes, such as licences, are not served."""
_CONSOLE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""The page's Content-Security-Policy: only its own scripts, only its own server, and no script made from text."""
_CONSOLE_HEADERS: Final = (
    f"Content-Security-Policy: {_CONSOLE_POLICY}\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    # Cached, but revalidated each time, so that an upgrade takes effect at once.
    "Cache-Control: no-cache\r\n"
)


class ConsoleFile:
    """Static file of the console, with an entity tag made from its content."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self._tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = f"{_CONSOLE_HEADERS}ETag: {self._tag}\r\n".encode()
        self._whole = Reply(200, content, _TYPES[path.suffix], headers)
        self._same = Reply(304, headers=headers)

    def reply(self, head: RequestHead) -> Reply:
        """Return the file, or 304 if the client already has it."""
        return self._same if self._tag in head.headers.get("if-none-match", "") else self._whole


def console_files() -> dict[str, ConsoleFile]:
    """Read the files of the console; return them by name."""
    return {path.name: ConsoleFile(path) for path in sorted(_CONSOLE_FOLDER.rglob("*")) if path.suffix in _TYPES}


class HistorySampler:
    """Takes a sample of all model versions every few seconds."""

    def __init__(self, server: InferenceServer, refresh: Callable[[], Awaitable[None]]) -> None:
        """``refresh`` brings what other processes have counted into this one."""
        self.history = MetricsHistory()
        self.loop = WorkLoop("sampling")
        self._server = server
        self._refresh = refresh

    async def run(self) -> None:
        """Take samples until the task is cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(INTERVAL)
            with self.loop.step("the front processes"):
                await self._refresh()
            with self.loop.step("the sample"):
                now = time.monotonic()
                await self._take(now - last)
                last = now

    async def _take(self, seconds: float) -> None:
        turns = LoopTurns()
        self.history.begin(time.time(), seconds)
        for running in list(self._server.running_versions()):
            with self.loop.step(f"model '{running.name}'"):
                queued = sum(running.waiting.values())
                reading = VersionReading(running.statistics, running.tokens, queued, running.pending)
                self.history.note((running.name, running.label), reading)
            await turns.go_on()
        self.history.end()


_PARAMETERS: Final = ("seconds", "model", "version", "level", "after")
_LONGEST: Final = int(SAMPLES * INTERVAL)
_MAX_RECORDS: Final = 500
"""Records of the log in one reply; the newest ones."""


class ConsoleQuery(NamedTuple):
    """Parameters of the URL of ``/ui/history``, ``/ui/log`` and ``/ui/samples``."""

    seconds: int = _LONGEST
    model: str = ""
    version: str = ""
    level: str = "verbose"
    after: int = 0

    @classmethod
    def parse(cls, text: str, allowed: Collection[str]) -> ConsoleQuery:
        """Read the query. Raises ``InvalidArgument``."""
        values: dict[str, str] = {}
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=len(_PARAMETERS))
        except ValueError:
            raise InvalidArgument(f"the query may have at most {len(_PARAMETERS)} parameters") from None
        for name, value in pairs:
            if name not in allowed or name in values:
                checked_name(name, "the name of a parameter")
                raise InvalidArgument(f"'{name}' is not a parameter, or given twice. There are: {', '.join(allowed)}.")
            values[name] = checked_name(value, f"parameter '{name}'")
        level = values.get("level", "verbose")
        if level not in LEVELS:
            raise InvalidArgument(f"parameter 'level' must be one of {', '.join(LEVELS)}, got: '{level}'")
        return cls(
            _number("seconds", values.get("seconds", str(_LONGEST)), _LONGEST),
            values.get("model", ""),
            values.get("version", ""),
            level,
            _number("after", values.get("after", "0"), 1 << 53),
        )


def _number(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 17 and int(text) <= most):
        raise InvalidArgument(f"parameter '{name}' must be a whole number from 0 to {most}, got: '{text}'")
    return int(text)


_NO_METRICS: Final = Reply(404, b'{"error":"metrics are disabled: the server runs with --allow-metrics=false"}')
_TO_CONSOLE: Final = Reply(308, content_type=reply.PLAIN, headers=b"Location: ../ui\r\n")
"""Links of the page are relative, so that it also works behind a proxy that adds a path prefix."""
_KEYS: Final = {
    "metrics": ("statistics", METRICS_CATEGORY),
    "history": ("statistics", METRICS_CATEGORY),
    "instances": ("statistics",),
    "control": ("model-repository",),
    "log": ("logging", "statistics"),
    "samples": ("metadata",),
}
"""Categories whose keys each path of data needs."""


class Console:
    """Router of the paths under ``/ui``; passes all other paths on to another router.

    The files need no key: they reveal nothing about the server. The page gets everything it shows from the usual
    endpoints, with the keys that those need, and from the paths in ``_KEYS``.
    """

    def __init__(
        self,
        server: InferenceServer,
        metrics: MetricsService | None,
        locks: Mapping[str, Lock],
        target_of: Callable[[RequestHead], HttpTarget],
        history: MetricsHistory | None,
        log: RecentLog,
        log_refusal: str = "",
    ) -> None:
        """``metrics`` and ``history`` are None if the server has no metrics page.

        ``log_refusal`` says why nobody may read the log here; empty if those with the keys may.
        """
        self._server = server
        self._metrics = metrics
        self._background_calls = BackgroundCalls()
        self._locks = locks
        self._target_of = target_of
        self._history = history
        self._log = log
        self._log_refusal = reply.error_reply(Forbidden(log_refusal)) if log_refusal else None
        found = console_files()
        self._files = {
            CONSOLE_PATH: found.pop("index.html"),
            **{f"{CONSOLE_PATH}/{name}": file for name, file in found.items()},
        }

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a head."""
        if not head.path.startswith(CONSOLE_PATH):
            return self._target_of(head)
        file = self._files.get(head.path)
        name = head.path.removeprefix(f"{CONSOLE_PATH}/")
        if file is None and name and name not in _KEYS:
            return self._target_of(head)
        if head.method not in ("GET", "HEAD"):
            return HttpTarget(reply.NOT_ALLOWED_JSON)
        if file is not None:
            return HttpTarget(file.reply(head))
        return self._data_target(name, head) if name else HttpTarget(_TO_CONSOLE)

    def _data_target(self, name: str, head: RequestHead) -> HttpTarget:
        refusals = (access.key_refusal(self._locks, category, head) for category in _KEYS[name])
        refusal = next((each for each in refusals if each is not None), None)
        match name:
            case "control":
                return HttpTarget(reply.json_reply({"note": self._server.control_note}), refusal)
            case "metrics" if self._metrics is None:
                return HttpTarget(_NO_METRICS, refusal)
            case "history" if self._history is None:
                return HttpTarget(_NO_METRICS, refusal)
            case "log":
                refusal = refusal or self._log_refusal
        return HttpTarget(refusal=refusal, call=getattr(self, f"_send_{name}"))

    def _send_instances(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        self._background_calls.start(connection, self._listed_instances())

    async def _listed_instances(self) -> Reply:
        turns = LoopTurns()
        listed = []
        for instance in self._server.instances():
            listed.append(instance)
            await turns.go_on()
        return _unstored(listed)

    def _send_metrics(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        assert self._metrics is not None
        self._metrics.send_page(connection, head, "text/plain; charset=utf-8", NO_STORE)

    def _send_history(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        self._background_calls.start(connection, self._read_history(head.query))

    async def _read_history(self, text: str) -> Reply:
        """Return the lines of a version, or the sums over all, and the rate of requests of each."""
        history = self._history
        assert history is not None
        query = ConsoleQuery.parse(text, ("seconds", "model", "version"))
        if query.model:
            return _unstored(history.of_version((query.model, query.version), query.seconds))
        document = history.of_all(query.seconds)
        turns = LoopTurns()
        versions = []
        for (model, version), rates in history.requests(query.seconds):
            versions.append({"model": model, "version": version, "requests": rates})
            await turns.go_on()
        return _unstored({**document, "versions": versions})

    def _send_samples(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        self._background_calls.start(connection, self._read_samples(head.query))

    async def _read_samples(self, text: str) -> Reply:
        """Return the shape and values of each input in a sample request to a model version."""
        query = ConsoleQuery.parse(text, ("model", "version"))
        running = self._server.manager.find(query.model, query.version)
        found = sample_inputs(running.signature, decoupled=running.decoupled)
        return _unstored({name: sample._asdict() for name, sample in found.items()})

    def _send_log(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        self._background_calls.start(connection, self._read_log(head.query))

    async def _read_log(self, text: str) -> Reply:
        """Return the newest records that are asked for, and the number of the last record of all."""
        query = ConsoleQuery.parse(text, ("model", "level", "after"))
        running = [each for each in self._server.running_versions() if each.name == query.model]
        instances = frozenset(instance.name for each in running for instance in each.instances)
        last, found = self._log.read(query.level, query.after, query.model, instances)
        turns = LoopTurns()
        newest: deque[dict[str, Any]] = deque(maxlen=_MAX_RECORDS)
        for each in found:
            newest.append(each.to_json())
            await turns.go_on()
        return _unstored({"last": last, "records": list(newest)})


def _unstored(value: object) -> Reply:
    return Reply(200, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), headers=NO_STORE)


def log_refusal(options: ServerOptions) -> str:
    """Return why the log cannot be read over HTTP; empty if it can.

    It has what models print and what clients sent, so that it is not for anybody who can connect.
    """
    ports = [
        port._replace(categories=("logging",))
        for port in open_ports(options)
        if port.service == "HTTP" and "logging" in port.categories
    ]
    if not ports:
        return ""
    return f"the log may contain what clients have sent, and anyone can connect to {ports[0]}. {remedy(ports)}"
