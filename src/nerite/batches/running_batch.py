"""A batch in memory: its next items, those under way, and what the one who executes items is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from nerite.batches.records import BatchRecord
from nerite.batches.store import ItemAnswerRow


class ItemRequest(NamedTuple):
    """An item as its executor gets it."""

    tenant: str
    url: str
    model: str
    body: bytes
    raised: bool
    """It goes in its tenant's own class; else only in room that nobody else wants."""
    request_id: str
    """Of this attempt at it."""
    paid: bool = False
    """Another server or router may have run it, and charged its tenant's quotas: they are not charged again."""


class ItemAnswer(NamedTuple):
    """The answer to an item, or the refusal to execute it now."""

    status: int
    """HTTP status."""
    body: bytes
    retry_after: float = 0.0
    request_id: str = ""


class ItemExecutor(Protocol):
    """Executes items: in this server, or by a router."""

    def submit(self, request: ItemRequest, done: Callable[[ItemAnswer], None]) -> Callable[[], None]:
        """Execute an item, and call ``done`` once, at once or later; return a call that cancels it.

        An item without room is answered with status 503 at once. Never raises.
        """

    def has_others(self, model: str) -> bool:
        """Return whether a model executes requests that are not items."""


class LoadedItem(NamedTuple):
    """An item whose body was read."""

    line: int
    custom_id: str
    body: bytes


class ItemUnderWay:
    """An item that was submitted."""

    __slots__ = ("began", "cancel", "item", "raised")

    def __init__(self, item: LoadedItem, raised: bool, began: float) -> None:
        self.item = item
        self.raised = raised
        self.began = began
        self.cancel: Callable[[], None] = _nothing
        """Cancels it; its answer is dropped then."""


class RunningBatch:
    """A batch that has not ended."""

    def __init__(self, record: BatchRecord) -> None:
        self.record = record
        self.ready: deque[LoadedItem] = deque()
        """Items to be submitted next."""
        self.ready_bytes = 0
        """Bytes of their bodies."""
        self.loaded = 0
        """Line of the last item that was loaded."""
        self.exhausted = False
        """All items were loaded."""
        self.ran_before = -1
        """Last line that may have run before this process took the batch; -1: not known yet."""
        self.under_way: dict[int, ItemUnderWay] = {}
        self.failures: dict[int, int] = {}
        """How often an item that waits again has failed."""
        self.answers: list[ItemAnswerRow] = []
        """Answers that are not committed."""
        self.outputs: list[str] = []
        """Output files that were written, while it is not known whether the batch has ended with them."""
        self.handled_at = 0.0
        """When something was last done for it, by the monotonic clock."""
        self.rests_until = 0.0
        """When its tenant's quota may have room again."""

    @property
    def planned(self) -> bool:
        """Whether its items may be submitted."""
        return bool(self.record.model)

    @property
    def done(self) -> bool:
        """Whether every item has been answered, though not all answers need be committed."""
        return self.planned and self.exhausted and not self.ready and not self.under_way

    def add(self, item: LoadedItem) -> None:
        """Submit an item that was loaded, after the others."""
        self.ready.append(item)
        self.ready_bytes += len(item.body)

    def next(self) -> LoadedItem:
        """Return the next item, which is no longer ready."""
        item = self.ready.popleft()
        self.ready_bytes -= len(item.body)
        return item

    def again(self, item: LoadedItem) -> None:
        """Submit an item again, before the others."""
        self.ready.appendleft(item)
        self.ready_bytes += len(item.body)

    def submit_no_more(self) -> None:
        """Drop the items that are ready, and load no others."""
        self.ready.clear()
        self.ready_bytes = 0
        self.exhausted = True


def _nothing() -> None:
    """Do nothing."""
