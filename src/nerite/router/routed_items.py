"""Executes items of batches at members: each is a request through the router, on no connection of a client."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from nerite.admission.policy import IDLE
from nerite.balancing.member import RoutedRequest
from nerite.batches.running_batch import ItemAnswer, ItemRequest
from nerite.core.request import Caller
from nerite.core.tensor import Buffer
from nerite.router.idle_members import has_others
from nerite.router.pools import PoolTable
from nerite.transports.access import CLASS
from nerite.transports.http.handler import HttpHandler
from nerite.transports.http.head import RequestHead
from nerite.transports.http.item_exchange import ItemExchange, item_head

_TENSORS: Final = re.compile("/v2/")
_NO_ROOM: Final = ItemAnswer(503, b'{"error":"no member has idle room"}')
_BROKEN: Final = ItemAnswer(502, b'{"error":"the member failed in the middle of its answer"}')
_TOO_LARGE: Final = ItemAnswer(502, b'{"error":"the answer of the member is larger than max-body of the router"}')


def _nothing() -> None:
    """Do nothing: the item has been answered."""


class RoutedItems:
    """Submits items to the handler of the router. Implements ``ItemExecutor``."""

    def __init__(self, table: PoolTable, handler: HttpHandler, max_answer: int) -> None:
        """``max_answer``: bytes of an answer, which is kept until it is complete."""
        self._table = table
        self._handler = handler
        self._max_answer = max_answer
        self._under_way: Counter[str] = Counter()
        """Items under way by model."""

    def submit(self, request: ItemRequest, done: Callable[[ItemAnswer], None]) -> Callable[[], None]:
        """Send an item to a member, and call ``done`` once, at once or later; return a call that cancels it."""
        model = request.model
        tokens = 1.0 if _TENSORS.match(request.url) else 0.0
        if not request.raised and not self._table.may_have_room(RoutedRequest(model, answer_tokens=tokens)):
            done(_NO_ROOM)
            return _nothing
        head = item_head(request.url, len(request.body))
        # HTTP/1.0 has no chunks, so the pieces of an answer come without their framing.
        head.version = "1.0"
        if not request.raised:
            head.fields.append((CLASS, IDLE.name))
            head.headers[CLASS] = IDLE.name
        level = "" if request.raised else IDLE.name
        head.caller = Caller(request.tenant, level, trusted=True, paid=request.paid)
        self._under_way[model] += 1
        ended = partial(self._ended, model)
        exchange = RoutedItem(self._handler, head, request.request_id, done, ended, self._max_answer)
        exchange.run(memoryview(request.body))
        return exchange.cancel

    def has_others(self, model: str) -> bool:
        """Return whether members that serve a model execute requests that are not items."""
        loads = (load for pool in self._table.pools for load in pool.balancer.members)
        return has_others(loads, {model, *self._under_way}, self._under_way.total())

    def _ended(self, model: str) -> None:
        self._under_way[model] -= 1
        if not self._under_way[model]:
            del self._under_way[model]


class RoutedItem(ItemExchange):
    """The exchange of one item, as the relay of an answer uses a client's connection."""

    def __init__(
        self,
        handler: HttpHandler,
        head: RequestHead,
        request_id: str,
        done: Callable[[ItemAnswer], None],
        ended: Callable[[], None],
        max_answer: int,
    ) -> None:
        super().__init__(handler, head, request_id, done, ended)
        self._left = max_answer

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Take a part of the answer."""
        self._left -= sum(map(len, pieces))
        if self._left < 0:
            self._fail(_TOO_LARGE)
        elif not self.gone:
            super().send_pieces(pieces)

    def send_bytes(self, data: Buffer) -> None:
        """Take a part of the answer."""
        self.send_pieces([data])

    def end_reply(self) -> None:
        """End the answer."""
        self.close_reply()

    def abort(self) -> None:
        """Take note that the answer will not be completed."""
        self._fail(_BROKEN)

    def _fail(self, answer: ItemAnswer) -> None:
        if not self.gone:
            done = self._done
            self.cancel()
            done(answer)
