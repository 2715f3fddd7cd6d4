"""What is answered under ``/ui``: the files of the page, and the numbers that it draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from nerite.config.options import METRICS_CATEGORY
from nerite.transports.http import access, reply
from nerite.transports.http.console import files
from nerite.transports.http.errands import Errands
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.reply import Reply
from nerite.transports.http.target import Target
from nerite.transports.http.turns import Turns
from nerite.transports.keys import Lock

if TYPE_CHECKING:
    from nerite.server import InferenceServer

PATH: Final = "/ui"
_METRICS: Final = f"{PATH}/metrics"
_INSTANCES: Final = f"{PATH}/instances"
_CONTROL: Final = f"{PATH}/control"
_MOVED: Final = Reply(308, content_type=reply.PLAIN, headers=b"Location: ../ui\r\n")
"""The page's own links are relative, so that it also works behind a proxy that puts a path in front."""
_NO_STORE: Final = b"Cache-Control: no-store\r\n"
_NO_METRICS: Final = Reply(404, b'{"error":"there are no metrics: the server runs with --allow-metrics=false"}')


class Console:
    """Answers what is its own, and leaves everything else to another router.

    The files are for everybody: they say nothing of the server. All that the page shows it asks of the endpoints that
    there are, with the keys that they need. Its numbers are the page of the metrics port, under the keys of statistics
    and of metrics; what it tells of instances needs that of statistics, and whether models are loaded by calls that of
    the model repository.
    """

    def __init__(
        self,
        server: InferenceServer,
        metrics: MetricsService | None,
        locks: Mapping[str, Lock],
        target_of: Callable[[RequestHead], Target],
    ) -> None:
        """``metrics`` are None where the server has no page of them."""
        self._server = server
        self._metrics = metrics
        self._errands = Errands()
        self._locks = locks
        self._target_of = target_of
        found = files.read()
        self._files = {PATH: found.pop("index.html"), **{f"{PATH}/{name}": file for name, file in found.items()}}

    def target(self, head: RequestHead) -> Target:
        """Return what a head asks for."""
        if not head.path.startswith(PATH):
            return self._target_of(head)
        file = self._files.get(head.path)
        if file is None and head.path not in (_METRICS, _INSTANCES, _CONTROL, f"{PATH}/"):
            return self._target_of(head)
        if head.method not in ("GET", "HEAD"):
            return Target(reply.NOT_ALLOWED_JSON)
        if file is not None:
            return Target(file.reply(head))
        if head.path == _INSTANCES:
            return Target(refusal=access.refusal(self._locks, "statistics", head), call=self._send_instances)
        if head.path == _CONTROL:
            refusal = access.refusal(self._locks, "model-repository", head)
            return Target(reply.json_reply({"note": self._server.control_note}), refusal)
        return self._numbers(head) if head.path == _METRICS else Target(_MOVED)

    def _numbers(self, head: RequestHead) -> Target:
        categories = ("statistics", METRICS_CATEGORY)
        refusals = (access.refusal(self._locks, category, head) for category in categories)
        refusal = next((each for each in refusals if each is not None), None)
        if self._metrics is None:
            return Target(_NO_METRICS, refusal)
        return Target(refusal=refusal, call=self._send_numbers)

    def _send_instances(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        self._errands.start(connection, self._instances())

    async def _instances(self) -> Reply:
        turns = Turns()
        told = []
        for instance in self._server.instances():
            told.append(instance)
            await turns.go_on()
        return reply.json_reply(told)._replace(headers=_NO_STORE)

    def _send_numbers(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        assert self._metrics is not None
        self._metrics.send_page(connection, head, "text/plain; charset=utf-8", _NO_STORE)
