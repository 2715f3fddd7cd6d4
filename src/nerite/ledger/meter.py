"""The meter of a model version: opens an account for each request, charges it, and makes its row at the end.

Nothing is charged twice and nothing is lost: the time that an instance was busy is in the accounts of its requests, in
rows, or in a row of the server itself if no request asked for it. No I/O, no clock; used on the loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

from nerite.core.engine_report import EngineReport
from nerite.core.errors import Cancelled, DeadlineExceeded, NeriteError, NoIdleRoom
from nerite.core.execution_observer import ExecutionTimes, ForwardingSink, request_id_of
from nerite.core.item_attempt import item_of
from nerite.core.model_calls import first_of
from nerite.ledger.engine_share import EngineShare, divide_step
from nerite.ledger.instance_clock import InstanceClock, InstanceTime
from nerite.ledger.row import Amounts, Ending, LedgerRow, Origin, RowKey, WallClock

if TYPE_CHECKING:
    from nerite.core.request import Caller, InferenceRequest, RequestHeader
    from nerite.core.response import InferenceResponse
    from nerite.instances.instance import Batch, ModelInstance

_new_tuple = tuple.__new__


class RequestAccount(ForwardingSink):
    """What a request has used so far. The sink in front of its caller, so it sees how the request ends."""

    __slots__ = (
        "_meter",
        "compute_ns",
        "ending",
        "engine",
        "leases",
        "queue_ns",
        "request",
        "request_id",
    )

    def __init__(self, meter: VersionMeter, request: InferenceRequest) -> None:
        self._sink = request.sink  # as the base class does
        self._meter = meter
        self.request = request
        self.request_id = "" if request.caused else request_id_of(request)
        self.queue_ns = -1
        """Until an instance started it; -1 while none has."""
        self.compute_ns = 0
        self.leases = 0
        """Number of batches that it is in, plus 1 while an engine has it."""
        self.ending: Ending | None = None
        self.engine: EngineShare | None = None

    @property
    def busy_ns(self) -> int:
        """The time of instances that it used."""
        engine = self.engine
        return self.compute_ns if engine is None else self.compute_ns + engine.busy_ns

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Note the last response, and pass each on."""
        if final:
            self._meter.answered(self, response.error, monotonic_ns())
        self._sink.respond(request, response, final)


class MeterSession(NamedTuple):
    """What all meters of a server share."""

    take: Callable[[LedgerRow], None]
    """Takes the rows."""
    take_again: Callable[[LedgerRow], None]
    """Takes the last rows of requests that had one while they were running."""
    numbers: Iterator[int]
    """Numbers of rows and instances."""
    wall: WallClock
    tenant_of: Callable[[Caller], tuple[str, str]]
    """Returns tenant and class of a caller."""


class VersionMeter:
    """Accounts of the requests to one model version, and clocks of its instances."""

    def __init__(self, model: str, version: str, session: MeterSession) -> None:
        self.model = model
        self.version = version
        self._session = session
        self._take, self._numbers, self._wall = session.take, session.numbers, session.wall
        self._shown: dict[RequestAccount, tuple[int, int]] = {}
        """Number and time of the last row of requests that are not over."""
        self._keys: dict[Ending, tuple[RequestHeader, RowKey]] = {}
        """By ending, the last header and the key of its rows: clients repeat their headers."""
        self._accounts: dict[InferenceRequest, RequestAccount] = {}
        self._clocks: dict[ModelInstance, InstanceClock] = {}
        self._engines: dict[ModelInstance, dict[InferenceRequest, RequestAccount]] = {}
        """Instances with an engine, and the requests that it has, in the order of their beginnings."""
        self._executes = self._closing = False
        self._gone: list[InstanceTime] = []
        """Last readings of closed instances."""
        self._used_ns = 0
        """Time that closed instances were used."""
        self._recorded_ns = 0
        """Time in rows of requests that are over."""

    # Instances

    def opened(self, instance: ModelInstance, now: int) -> None:
        """Start the clock of an instance, which was loaded."""
        self._executes = True
        self._clocks[instance] = InstanceClock(next(self._session.numbers), now)
        if instance.report is not None:
            self._engines[instance] = {}

    def closed(self, instance: ModelInstance, now: int) -> None:
        """Stop the clock of an instance."""
        if instance in self._engines:
            self.reported(instance, None, now)
            del self._engines[instance]
        clock = self._clocks.pop(instance)
        clock.rest(now)
        self._used_ns += clock.used_ns
        self._gone.append(self._reading(instance, clock))

    def close(self) -> None:
        """No more requests come."""
        self._closing = True

    # Requests

    def open(self, request: InferenceRequest) -> None:
        """Open the account of a request that is about to be queued."""
        self._accounts[request] = request.sink = RequestAccount(self, request)

    def joined(self, request: InferenceRequest) -> None:
        """Record a request that shares the answer of another."""
        self._record(RequestAccount(self, request), Ending.JOINED, monotonic_ns())

    def answered(self, account: RequestAccount, error: NeriteError | None, now: int) -> None:
        """Record how a request ended. Its row is made once no instance has it any more."""
        if account.ending is not None:
            return
        begun = account.queue_ns >= 0
        if error is None:
            account.ending = Ending.ANSWERED if begun or not self._executes else Ending.CACHED
        elif begun and isinstance(error, NoIdleRoom):
            account.ending = Ending.PREEMPTED
        elif account.request.cancelled or isinstance(error, Cancelled | DeadlineExceeded):
            account.ending = Ending.CANCELLED
        else:
            account.ending = Ending.FAILED if begun or not self._executes else Ending.REFUSED
        if not account.leases:
            self._settle(account, now)

    # Executions

    def leased(self, instance: ModelInstance, batch: Batch, now: int) -> None:
        """Record that an instance gets a batch."""
        clock = self._clocks.get(instance)
        if clock is not None:
            clock.lease(now)
        accounts = self._accounts
        for request in batch:
            account = accounts.get(request.origin)
            if account is not None:
                account.leases += 1
                if account.queue_ns < 0:
                    account.queue_ns = now - account.request.arrived_ns

    def returned(self, instance: ModelInstance, batch: Batch, timings: ExecutionTimes | None, now: int) -> None:
        """Charge the requests of a batch that came back. Without ``timings`` it died, and the time until now counts."""
        accounts = self._accounts
        held = [account for request in batch if (account := accounts.get(request.origin)) is not None]
        clock = self._clocks.get(instance)
        if clock is not None:
            clock.end_lease()
            engine = self._engines.get(instance)
            if engine is None:
                used = clock.use_lease(now) if timings is None else clock.use(timings.started_ns, timings.ended_ns)
                if used:
                    self._divide(used, held, now)
            else:
                engine.update(
                    (each.request, each)
                    for each in held
                    if each.ending is None and not (each.engine and each.engine.over)
                )
        for account in held:
            account.leases -= 1
            if account.ending is not None and not account.leases:
                self._settle(account, now)

    def followed(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes, now: int) -> None:
        """Charge a step that ran in a worker right after another model, without a queue: each request gets a row."""
        clocks = sorted(self._clocks.values(), key=lambda clock: clock.until_ns)
        if not clocks:
            return
        accounts = [RequestAccount(self, request) for request in requests]
        used = clocks[0].use(timings.started_ns, timings.ended_ns)
        self._divide(used, accounts, now)
        for account in accounts:
            self._record(account, Ending.FAILED if timings.failed else Ending.ANSWERED, now)

    def _divide(self, used: int, accounts: Sequence[RequestAccount], now: int) -> None:
        """Charge the time of a batch to its requests, by rows."""
        if not accounts:  # warm-up, or requests that only fill a slot
            self._recorded_ns += used
            key = RowKey("", self.model, self.version, origin=Origin.SERVER)
            wall = (now + self._wall.offset_ns) / 1e9
            number = next(self._numbers)
            self._take(LedgerRow(number, wall, wall, key, Amounts(0, compute_ns=used)))
            return
        first, *others = accounts
        left = used
        if others:
            rows = sum([account.request.header.batch_size for account in accounts]) or 1
            for account in others:
                share = used * account.request.header.batch_size // rows
                account.compute_ns += share
                left -= share
        first.compute_ns += left

    # Engines

    def reported(self, instance: ModelInstance, report: EngineReport | None, now: int) -> None:
        """Charge the requests of an engine with the step that it reports. None: the engine is gone with all of them."""
        engine, clock = self._engines.get(instance), self._clocks.get(instance)
        if clock is None:
            return
        if engine is None:
            engine = self._engines[instance] = {}
        if report is None:
            self._charge_step(clock, clock.until_ns, now, EngineReport(), self._shares(engine, {}))
            for lost in [*engine.values()]:
                self._left_engine(engine, lost, now)
            return
        tokens: dict[RequestAccount, int] = {}
        went_on = bool(self._shares(engine, tokens))
        began_ns = now
        for request, count, begun, _ in report.progress:
            account = self._accounts.get(request.origin)
            if account is None:
                continue
            tokens[account] = tokens.get(account, 0) + count
            if begun is not None and account.engine is None:
                account.engine = EngineShare(begun)
                account.leases += 1
                account.queue_ns = begun.at_ns - account.request.arrived_ns
                engine[account.request] = account
                began_ns = min(began_ns, begun.at_ns)
        shares = self._shares(engine, tokens)
        if report.step_ended_ns:
            began_ns, ended_ns = report.step_began_ns, report.step_ended_ns
        else:  # it does not time its steps: while it has requests, it runs one after the other
            began_ns, ended_ns = clock.until_ns if went_on else began_ns, now
        self._charge_step(clock, began_ns, ended_ns, report, shares)
        for share, count in shares:
            if count:
                share.advance(count, report.block_size, ended_ns)
        for request, _, _, ended in report.progress:
            account = self._accounts.get(request.origin)
            if ended is not None and account is not None:
                if account.engine is not None:
                    account.engine.advance(0, report.block_size, ended_ns)
                self._left_engine(engine, account, now)

    @staticmethod
    def _shares(
        engine: dict[InferenceRequest, RequestAccount], tokens: dict[RequestAccount, int]
    ) -> list[tuple[EngineShare, int]]:
        return [(each.engine, tokens.get(each, 0)) for each in engine.values() if each.engine is not None]

    @staticmethod
    def _charge_step(
        clock: InstanceClock, began: int, ended: int, report: EngineReport, shares: Sequence[tuple[EngineShare, int]]
    ) -> None:
        if shares and (used := clock.use(began, ended)):
            divide_step(used, report, shares)

    def _left_engine(self, engine: dict[InferenceRequest, RequestAccount], account: RequestAccount, now: int) -> None:
        engine.pop(account.request, None)
        if account.engine is None or account.engine.over:
            return
        account.engine.over = True
        account.leases -= 1
        if account.ending is not None and not account.leases:
            self._settle(account, now)

    # Rows

    def _settle(self, account: RequestAccount, now: int) -> None:
        """Make the row of a request that is over."""
        self._accounts.pop(account.request, None)
        if self._engines:
            for engine in self._engines.values():
                engine.pop(account.request, None)
        assert account.ending is not None
        self._record(account, account.ending, now)
        # Its sink leads here: without this, what the client sent would be freed by the cycle collector only.
        del account.request

    def _record(self, account: RequestAccount, ending: Ending, now: int) -> None:
        self._recorded_ns += account.busy_ns
        if account in self._shown:
            self._session.take_again(self._row(self._shown.pop(account)[0], account, ending, now))
        else:
            self._take(self._row(next(self._numbers), account, ending, now))

    def _row(self, number: int, account: RequestAccount, ending: Ending, now: int) -> LedgerRow:
        request, engine = account.request, account.engine
        known = self._keys.get(ending)
        if known is not None and known[0] is request.header and not (request.caused or request.background):
            key = known[1]
        else:
            key = self._key(request, ending)
        queue_ns = account.queue_ns
        if queue_ns < 0:
            queue_ns = now - request.arrived_ns
        if engine is None:
            used = (1, 0, 0, 0, queue_ns, account.compute_ns, 0, 0, 0, 0, 0)
        else:
            begun = engine.begun
            once = 0 if request.repeats else 1  # as quotas charge it
            used = (
                1,
                once * begun.prompt_tokens,
                once * begun.cached_tokens,
                engine.answer_tokens,
                queue_ns,
                account.compute_ns,
                engine.prefill_ns,
                engine.decode_ns,
                engine.kv_block_ns,
                0,
                0,
            )
        wall = self._wall.offset_ns
        times = (request.arrived_ns + wall) / 1e9, (now + wall) / 1e9
        request_id = account.request_id
        if request.caused or (request_id and item_of(request_id)):
            request_id = _id_of_item(account)
        # Not by their constructors, which take several times as long.
        return _new_tuple(LedgerRow, (number, *times, key, _new_tuple(Amounts, used), request_id))

    def _key(self, request: InferenceRequest, ending: Ending) -> RowKey:
        header = request.header
        caller = first_of(request).header.caller if request.caused else header.caller
        assignment = header.assignment
        tenant, level = ("", "") if caller is None else self._session.tenant_of(caller)
        key = RowKey(
            tenant,
            self.model,
            self.version,
            "" if assignment is None else assignment.route,
            "" if assignment is None else assignment.arm,
            level,
            Origin.CALL if request.caused else Origin.SHADOW if request.background else Origin.CLIENT,
            ending,
        )
        if key.origin == Origin.CLIENT:
            self._keys[ending] = header, key
        return key

    # Readings

    def running_rows(self, now: int) -> list[LedgerRow]:
        """Return rows of the requests that are not over, if they were charged since the last call."""
        rows = []
        for account in self._accounts.values():
            number, busy_ns = self._shown.get(account, (0, 0))
            if account.busy_ns != busy_ns:
                number = number or next(self._numbers)
                self._shown[account] = number, account.busy_ns
                rows.append(self._row(number, account, Ending.RUNNING, now))
        return rows

    def times(self, now: int) -> list[InstanceTime]:
        """Return the times of all instances up to now, or as far as they are known; once also those of closed ones."""
        found, self._gone = self._gone, []
        for instance, clock in self._clocks.items():
            if not clock.leased and not self._engines.get(instance):
                clock.rest(now)
            found.append(self._reading(instance, clock))
        return found

    @property
    def unaccounted_ns(self) -> int:
        """Time that instances were used and that is neither in rows nor in accounts. Anything but 0 is a bug."""
        used = self._used_ns + sum(clock.used_ns for clock in self._clocks.values())
        return used - self._recorded_ns - sum(account.busy_ns for account in self._accounts.values())

    @property
    def over(self) -> bool:
        """Whether nothing more will come: all instances are closed, all requests are over, all times were read."""
        return self._closing and not (self._clocks or self._accounts or self._gone)

    def _reading(self, instance: ModelInstance, clock: InstanceClock) -> InstanceTime:
        wall_ns = self._wall.offset_ns
        if clock.is_set_back(wall_ns):
            clock.number = next(self._numbers)
        return clock.reading(self.model, self.version, instance.name, wall_ns)


def _id_of_item(account: RequestAccount) -> str:
    """Return the request id of an item of a batch, or of the one that has caused a request; empty for all others.

    It is believed only if the caller is trusted, because items that are repeated are not charged.
    """
    first = first_of(account.request)
    caller = first.header.caller
    if caller is None or not caller.trusted:
        return ""
    if first is account.request:
        return account.request_id
    sink: object = first.sink
    while sink is not None and not isinstance(sink, RequestAccount):
        sink = getattr(sink, "behind", None)
    return sink.request_id if sink is not None and item_of(sink.request_id) else ""
