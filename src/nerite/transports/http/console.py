"""The console under ``/ui``: the static files of the page, and the data that it polls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nerite.config.options import METRICS_CATEGORY
from nerite.transports import access
from nerite.transports.access import Lock
from nerite.transports.http import reply
from nerite.transports.http.handler import BackgroundCalls, HttpExchange, LoopTurns
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.reply import Reply

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_FOLDER: Final = Path(__file__).with_name("pages") / "console"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Content types by suffix. Files with other suffixes, such as licences, are not served."""
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""The page's Content-Security-Policy: only its own scripts, only its own server, and no script made from text."""
_HEADERS: Final = (
    f"Content-Security-Policy: {_POLICY}\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    # Cached, but revalidated each time, so that an upgrade takes effect at once.
    "Cache-Control: no-cache\r\n"
)


class ConsoleFile:
    """Static file of the console, with an entity tag made from its content."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self._tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = f"{_HEADERS}ETag: {self._tag}\r\n".encode()
        self._whole = Reply(200, content, _TYPES[path.suffix], headers)
        self._same = Reply(304, headers=headers)

    def reply(self, head: RequestHead) -> Reply:
        """Return the file, or 304 if the client already has it."""
        return self._same if self._tag in head.headers.get("if-none-match", "") else self._whole


def read_files() -> dict[str, ConsoleFile]:
    """Read all files; return them by name."""
    return {path.name: ConsoleFile(path) for path in sorted(_FOLDER.rglob("*")) if path.suffix in _TYPES}


PATH: Final = "/ui"
_METRICS: Final = f"{PATH}/metrics"
_INSTANCES: Final = f"{PATH}/instances"
_CONTROL: Final = f"{PATH}/control"
_MOVED: Final = Reply(308, content_type=reply.PLAIN, headers=b"Location: ../ui\r\n")
"""Links of the page are relative, so that it also works behind a proxy that adds a path prefix."""
_NO_STORE: Final = b"Cache-Control: no-store\r\n"
_NO_METRICS: Final = Reply(404, b'{"error":"metrics are disabled: the server runs with --allow-metrics=false"}')


class Console:
    """Router of the paths under ``/ui``; passes all other paths on to another router.

    The files need no key: they reveal nothing about the server. The page gets everything it shows from the usual
    endpoints, with the keys that those need. Its numbers are the page of the metrics port, which needs the keys of
    statistics and of metrics here; the list of instances needs the key of statistics, and the note about model control
    that of the model repository.
    """

    def __init__(
        self,
        server: InferenceServer,
        metrics: MetricsService | None,
        locks: Mapping[str, Lock],
        target_of: Callable[[RequestHead], HttpTarget],
    ) -> None:
        """``metrics`` is None if the server has no metrics page."""
        self._server = server
        self._metrics = metrics
        self._background_calls = BackgroundCalls()
        self._locks = locks
        self._target_of = target_of
        found = read_files()
        self._files = {PATH: found.pop("index.html"), **{f"{PATH}/{name}": file for name, file in found.items()}}

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a head."""
        if not head.path.startswith(PATH):
            return self._target_of(head)
        file = self._files.get(head.path)
        if file is None and head.path not in (_METRICS, _INSTANCES, _CONTROL, f"{PATH}/"):
            return self._target_of(head)
        if head.method not in ("GET", "HEAD"):
            return HttpTarget(reply.NOT_ALLOWED_JSON)
        if file is not None:
            return HttpTarget(file.reply(head))
        if head.path == _INSTANCES:
            return HttpTarget(refusal=access.key_refusal(self._locks, "statistics", head), call=self._send_instances)
        if head.path == _CONTROL:
            refusal = access.key_refusal(self._locks, "model-repository", head)
            return HttpTarget(reply.json_reply({"note": self._server.control_note}), refusal)
        return self._metrics_target(head) if head.path == _METRICS else HttpTarget(_MOVED)

    def _metrics_target(self, head: RequestHead) -> HttpTarget:
        categories = ("statistics", METRICS_CATEGORY)
        refusals = (access.key_refusal(self._locks, category, head) for category in categories)
        refusal = next((each for each in refusals if each is not None), None)
        if self._metrics is None:
            return HttpTarget(_NO_METRICS, refusal)
        return HttpTarget(refusal=refusal, call=self._send_metrics)

    def _send_instances(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        self._background_calls.start(connection, self._instances())

    async def _instances(self) -> Reply:
        turns = LoopTurns()
        listed = []
        for instance in self._server.instances():
            listed.append(instance)
            await turns.go_on()
        return reply.json_reply(listed)._replace(headers=_NO_STORE)

    def _send_metrics(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        assert self._metrics is not None
        self._metrics.send_page(connection, head, "text/plain; charset=utf-8", _NO_STORE)
