"""The rules of the dynamic batcher, written down as plainly as they can be: slow, and obviously right."""

from __future__ import annotations

from dataclasses import dataclass

from nerite.core.request import InferenceRequest
from nerite.scheduling.decider import BatchingRules


@dataclass(eq=False)
class Waiting:
    """A request that waits."""

    request: InferenceRequest
    level: int
    since: int
    order: tuple[int, int]
    deadline: int | None
    delayed: bool = False

    @property
    def rank(self) -> tuple[int, bool, tuple[int, int]]:
        return self.level, self.delayed, self.order


class BatcherModel:
    """What ``DynamicBatcher`` should do."""

    def __init__(self, rules: BatchingRules) -> None:
        self.rules = rules
        self.waiting: list[Waiting] = []
        self.held = rules.hold_until
        self.count = 0

    def in_order(self) -> list[Waiting]:
        """Higher priorities first; in a level those in time first; then by arrival, or by when their time was over."""
        return sorted(self.waiting, key=lambda each: each.rank)

    def offer(self, request: InferenceRequest, now: int) -> bool:
        """Whether the queue takes it."""
        rules = self.rules
        priority = request.header.priority
        level = priority if 1 <= priority <= rules.levels else rules.default_level
        policy = rules.policies.get(level, rules.default_policy)
        if policy.max_size and sum(each.level == level for each in self.waiting) >= policy.max_size:
            return False
        timeout = policy.timeout_us
        if policy.allow_override and 0 < request.header.timeout_us < timeout:
            timeout = request.header.timeout_us
        self.count += 1
        deadline = now + timeout * 1000 if timeout else None
        self.waiting.append(Waiting(request, level, now, (0, self.count), deadline))
        return True

    def expire(self, now: int) -> list[InferenceRequest]:
        over = [each for each in self.waiting if each.deadline is not None and each.deadline <= now]
        refused = []
        for each in sorted(over, key=lambda each: (each.deadline, each.order)):
            policy = self.rules.policies.get(each.level, self.rules.default_policy)
            if policy.delay_on_timeout:
                assert each.deadline is not None
                each.order = (each.deadline, each.order[1])
                each.delayed = True
                each.deadline = None
            else:
                self.waiting.remove(each)
                refused.append(each.request)
        return refused

    def chosen(self, now: int) -> tuple[list[Waiting] | None, int | None, bool]:
        """The batch that should run now; or None, and when the one that is gathered has waited enough.

        And whether it is full: nothing that follows what waits could join.
        """
        rules = self.rules
        limit = rules.max_batch_size
        preferred = rules.preferred_sizes or (limit,)
        gathered: list[Waiting] = []
        rows = 0
        best = 0
        boundary = False
        for each in self.in_order():
            more = max(1, each.request.header.batch_size)
            if gathered:
                if rows + more > max(preferred) and not best:
                    best = len(gathered)
                if rows + more > limit:
                    boundary = True
                    break
                if each.request.header.batch_key != gathered[0].request.header.batch_key:
                    boundary = True
                    break
            gathered.append(each)
            rows += more
            if rows in preferred:
                best = len(gathered)
        if not gathered:
            return None, None, False
        full = boundary or rows >= max(preferred)
        due = min(each.since for each in gathered) + rules.max_delay_us * 1000
        overdue = bool(rules.max_delay_us) and now >= due
        if best and not overdue:
            return gathered[:best], None, full
        if full or overdue or not rules.max_delay_us:
            return gathered, None, full
        return None, due, False

    def take(self, now: int) -> tuple[list[InferenceRequest] | None, int | None]:
        """The batch; or None, and when to ask again."""
        if len(self.waiting) < self.held:
            return None, None
        self.held = 0
        batch, due, _ = self.chosen(now)
        if batch is None:
            return None, due
        for each in batch:
            self.waiting.remove(each)
        return [each.request for each in batch], None

    def take_full(self, now: int) -> list[InferenceRequest] | None:
        """The batch, if it is full."""
        return self.take(now)[0] if len(self.waiting) >= self.held and self.chosen(now)[2] else None

    def displace(self, request: InferenceRequest) -> InferenceRequest | None:
        """The last in order, if that is of a lower priority."""
        rules = self.rules
        priority = request.header.priority
        level = priority if 1 <= priority <= rules.levels else rules.default_level
        if not self.waiting or self.in_order()[-1].level <= level:
            return None
        last = self.in_order()[-1]
        self.waiting.remove(last)
        return last.request

    def withdraw(self, request: InferenceRequest) -> bool:
        before = len(self.waiting)
        self.waiting = [each for each in self.waiting if each.request is not request]
        return len(self.waiting) < before

    def drain(self) -> list[InferenceRequest]:
        drained = [each.request for each in self.in_order()]
        self.waiting.clear()
        return drained

    def next_deadline(self) -> int | None:
        return min((each.deadline for each in self.waiting if each.deadline is not None), default=None)
