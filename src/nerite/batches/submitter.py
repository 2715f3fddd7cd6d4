"""Submits the items of batches as the planner says, and takes their answers. All of it is plain calls.

An item for which an exception is raised is tried again, and fails then; whatever is raised, what is under way is known.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from nerite.batches.deadline_planner import DeadlinePlanner
from nerite.batches.idle_room import IdleRoom
from nerite.batches.items import answer_line, error_line
from nerite.batches.output_files import new_item_id
from nerite.batches.records import ItemState
from nerite.batches.running_batch import ItemAnswer, ItemExecutor, ItemRequest, ItemUnderWay, LoadedItem, RunningBatch
from nerite.batches.store import ItemAnswerRow
from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.core.item_attempt import new_attempt
from nerite.core.work_loop import WorkLoop

LOW: Final = 64
"""Number of loaded items below which more are loaded."""
_OTHERS_SECONDS: Final = 10.0
"""Time for which batches keep their pace after others have last used a model."""
_AT_ONCE: Final = 8
"""Items that are submitted per turn of the event loop."""
_ATTEMPTS: Final = 3
"""Times that an item is tried which the server fails to execute."""
_SHORTEST_REST: Final = 0.5
_LONGEST_REST: Final = 600.0
"""Seconds for which a batch submits nothing after a quota has refused an item, whatever the refusal says."""
_NO_ROOM: Final = 503
_QUOTA: Final = 429
_FAILURES: Final = frozenset((408, 500, 502, 504))


class ItemSubmitter:
    """Submits the items of all batches of a server. Used from the loop's thread only."""

    def __init__(
        self,
        loop: WorkLoop,
        batches: Mapping[str, RunningBatch],
        planner: DeadlinePlanner,
        executor: ItemExecutor,
        most: int,
        most_of: Callable[[str], int],
        wake: Callable[[], None],
    ) -> None:
        """``most`` is the maximum number of items under way, and ``most_of`` returns that of a tenant.

        ``wake`` is called when answers have come, or items should be loaded.
        """
        self._loop = loop
        self._batches = batches
        self._planner = planner
        self._executor = executor
        self._most = most
        self._most_of = most_of
        self._wake = wake
        self.counts = dict.fromkeys(("completed", "failed", "expired", "refused", "retried"), 0)
        """Items by what became of them; one may be refused or retried several times."""
        self.full: set[str] = set()
        """Tenants for whom no more answers may be stored."""
        self.allowed_until = -math.inf
        """When the leases of the batches are over, by the monotonic clock."""
        self._rooms: dict[str, IdleRoom] = {}
        self._others_until: dict[str, float] = {}
        """Until when batches of a model keep their pace, because others use it."""
        self._others: dict[str, bool] = {}
        """Whether others use a model, as the executor has said in this turn of the event loop."""
        self._submitting = False
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def under_way(self) -> int:
        """Number of items under way."""
        return sum(len(batch.under_way) for batch in self._batches.values())

    @property
    def models(self) -> set[str]:
        """The models of which something is remembered."""
        return {*self._rooms, *self._others_until}

    def stop(self) -> None:
        """Submit no more items."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()

    def submit_soon(self) -> None:
        """Submit what there is room for, in the next turn of the event loop."""
        if not self._submitting and not self._stopping:
            self._submitting = True
            asyncio.get_running_loop().call_soon(self._submit)

    def _submit(self) -> None:
        """Submit items while there is room; a few in each turn of the loop, so that others are not delayed."""
        self._submitting = False
        # Without commits, answers would only gather in memory.
        admits = self._loop.admits("submit") and self._loop.admits("commit")
        if admits and not self._stopping and time.monotonic() < self.allowed_until:
            with self._loop.step("submit", routine=True):
                self._submit_due()

    def _submit_due(self) -> None:
        now = time.time()
        left = min(self._most - self.under_way, _AT_ONCE)
        wakes: list[float] = []
        used = Counter[str]()
        for batch in self._batches.values():
            used[batch.record.tenant] += len(batch.under_way)
        self._others = {}
        for key in self._planner.order(now):
            batch = self._batches[key]
            tenant = batch.record.tenant
            if left <= 0:
                break
            if not batch.ready or tenant in self.full or not self._loop.admits(key):
                continue
            try:
                own = min(left, self._most_of(tenant) - used[tenant])
                while own > 0 and batch.ready and (raised := self._lane(batch, now, wakes)) is not None:
                    own, left = own - 1, left - 1
                    used[tenant] += 1
                    self._begin(batch, raised, now)
            except Exception as error:
                self._loop.failed(key, error, tenant)
        if left <= 0 and self.under_way < self._most:
            self.submit_soon()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wakes:
            delay = max(min(wakes) - now, 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self.submit_soon)

    def cancel(self, batch: RunningBatch) -> None:
        """Cancel the items of a batch that are under way, and submit no more."""
        batch.submit_no_more()
        for under_way in list(batch.under_way.values()):
            if batch.under_way.pop(under_way.item.line, None) is not None:
                if not under_way.raised:
                    self._room(batch).withdrawn()
                try:
                    under_way.cancel()
                except Exception as error:
                    report("loop", error, f"in the cancellation of an item of batch '{batch.record.id}'")

    def forget_models(self) -> None:
        """Forget the models that no batch uses."""
        models = {each.record.model for each in self._batches.values()}
        self._rooms = {model: room for model, room in self._rooms.items() if model in models or room.under_way}
        self._others_until = {model: until for model, until in self._others_until.items() if model in models}

    def _lane(self, batch: RunningBatch, now: float, wakes: list[float]) -> bool | None:
        """Return whether the next item of a batch goes raised; None if it has to wait, until a time in ``wakes``."""
        if now < batch.rests_until:
            wakes.append(batch.rests_until)
            return None
        room, key = self._room(batch), batch.record.id
        paced = self._has_others(batch.record.model, now) and len(batch.under_way) >= self._planner.pace(key, now)
        if not paced and room.admits(now):
            return False
        if len(batch.under_way) < self._planner.needs(key, now):
            return True
        if (until := room.wakes(now)) is not None:
            wakes.append(until)
        return None

    def _has_others(self, model: str, now: float) -> bool:
        """Return whether others use a model, or did a moment ago; asked once for all batches of the model."""
        if model not in self._others:
            self._others[model] = self._executor.has_others(model)
            if self._others[model]:
                self._others_until[model] = now + _OTHERS_SECONDS
        return now < self._others_until.get(model, 0.0)

    def _room(self, batch: RunningBatch) -> IdleRoom:
        model = batch.record.model
        room = self._rooms.get(model)
        if room is None:
            room = self._rooms[model] = IdleRoom(self._most)
        return room

    def _begin(self, batch: RunningBatch, raised: bool, now: float) -> None:
        item = batch.next()
        record = batch.record
        under_way = batch.under_way[item.line] = ItemUnderWay(item, raised, now)
        if not raised:
            self._room(batch).begun()
        attempt = new_attempt(record.id, item.line)
        paid = item.line <= batch.ran_before
        request = ItemRequest(record.tenant, record.endpoint, record.model, item.body, raised, attempt, paid)
        try:
            under_way.cancel = self._executor.submit(request, partial(self._done, batch, under_way))
        except Exception as error:
            if batch.under_way.pop(item.line, None) is under_way and not raised:
                self._room(batch).withdrawn()
            self._try_again(batch, item, report("loop", error, f"in an item of batch '{record.id}'"))

    def _done(self, batch: RunningBatch, under_way: ItemUnderWay, answer: ItemAnswer) -> None:
        """Take the answer to an item. Never raises."""
        item, now = under_way.item, time.time()
        if batch.under_way.pop(item.line, None) is not under_way:
            return  # the batch has ended
        if not under_way.raised:
            self._settle(self._room(batch), answer, now)
        try:
            self._take(batch, under_way, answer, now)
        except Exception as error:
            self._try_again(batch, item, report("loop", error, f"in an answer of batch '{batch.record.id}'"))
        if len(batch.ready) < LOW or batch.answers:
            self._wake()
        self.submit_soon()

    def _try_again(self, batch: RunningBatch, item: LoadedItem, error: NeriteError) -> None:
        """Submit an item again for which an exception was raised; it fails if that was its last attempt."""
        failures = batch.failures.pop(item.line, 0) + 1
        if failures < _ATTEMPTS:
            batch.failures[item.line] = failures
            batch.again(item)
        else:
            self.fail(batch, item.line, item.custom_id, "internal_error", error.message)

    @staticmethod
    def _settle(room: IdleRoom, answer: ItemAnswer, now: float) -> None:
        """Note in the room that an item has left it."""
        if answer.status == _NO_ROOM:
            room.refused(now, answer.retry_after)
        elif answer.status == _QUOTA:
            room.withdrawn()
        else:
            room.answered()

    def _take(self, batch: RunningBatch, under_way: ItemUnderWay, answer: ItemAnswer, now: float) -> None:
        item = under_way.item
        if answer.status in (_NO_ROOM, _QUOTA):
            self.counts["refused"] += 1
            batch.again(item)
            if answer.status == _QUOTA or under_way.raised:
                batch.rests_until = now + min(max(answer.retry_after, _SHORTEST_REST), _LONGEST_REST)
            return
        failures = batch.failures.get(item.line, 0) + 1
        if answer.status in _FAILURES and failures < _ATTEMPTS:
            self.counts["retried"] += 1
            batch.failures[item.line] = failures
            batch.again(item)
            return
        good = answer.status == 200
        state = ItemState.COMPLETED if good else ItemState.FAILED
        line = answer_line(new_item_id(), item.custom_id, answer.status, answer.request_id, answer.body)
        self._planner.ended(batch.record.id, now - under_way.began, now)
        batch.failures.pop(item.line, None)
        self.counts[str(state)] += 1
        batch.answers.append(ItemAnswerRow(batch.record.id, item.line, state, line, item.custom_id))

    def fail(self, batch: RunningBatch, line: int, custom_id: str, code: str, message: str) -> None:
        """Give an item an error line in place of an answer."""
        self.counts["failed"] += 1
        answer = error_line(new_item_id(), custom_id, code, message)
        batch.answers.append(ItemAnswerRow(batch.record.id, line, ItemState.FAILED, answer, custom_id))
        self._planner.ended(batch.record.id, 0.0, time.time())
        self._wake()
