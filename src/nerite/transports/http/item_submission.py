"""Executes items of batches in this process: each is a request to the handlers of the HTTP port, on no connection."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from nerite.admission.policy import IDLE
from nerite.batches.running_batch import ItemAnswer, ItemRequest
from nerite.core.errors import NeriteError
from nerite.core.request import Caller
from nerite.transports.http.handler import HttpHandler
from nerite.transports.http.item_exchange import ItemExchange, item_head

if TYPE_CHECKING:
    from nerite.models.running_version import RunningVersion
    from nerite.server import InferenceServer

_NO_ROOM: Final = ItemAnswer(503, b'{"error":"the model has no idle instance"}')


def _nothing() -> None:
    """Do nothing: the item has been answered."""


class ItemSubmission:
    """Submits items to a handler. Implements ``ItemExecutor``."""

    def __init__(self, server: InferenceServer, handler: HttpHandler) -> None:
        self._server = server
        self._handler = handler
        self._under_way: Counter[str] = Counter()
        """Items under way by model."""

    def submit(self, request: ItemRequest, done: Callable[[ItemAnswer], None]) -> Callable[[], None]:
        """Execute an item, and call ``done`` once, at once or later; return a call that cancels it."""
        if not request.raised and not self._has_room(request.model):
            done(_NO_ROOM)
            return _nothing
        head = item_head(request.url, len(request.body))
        level = "" if request.raised else IDLE.name
        head.caller = Caller(request.tenant, level, trusted=True, paid=request.paid)
        self._under_way[request.model] += 1
        exchange = ItemExchange(self._handler, head, request.request_id, done, partial(self._ended, request.model))
        exchange.run(memoryview(bytearray(request.body)))
        return exchange.cancel

    def _ended(self, model: str) -> None:
        self._under_way[model] -= 1
        if not self._under_way[model]:
            del self._under_way[model]

    def has_others(self, model: str) -> bool:
        """Return whether a model executes requests that are not items."""
        return sum(version.in_flight for version in self._versions(model)) > self._under_way[model]

    def _has_room(self, model: str) -> bool:
        """Return whether a model has an instance without work. Of an engine, admission control knows it better."""
        versions = self._versions(model)
        return not versions or any(
            version.generates or (not version.pending and version.in_flight < max(len(version.instances), 1))
            for version in versions
        )

    def _versions(self, model: str) -> list[RunningVersion]:
        """Return the versions that requests to a model or a route go to; none if they get an error."""
        route = self._server.routes.get(model)
        names = [(model, "")] if route is None else [(arm.model, arm.version) for arm in route.by_weight]
        found = []
        for name, version in names:
            with contextlib.suppress(NeriteError):
                found.append(self._server.find(name, version, ""))
        return found
