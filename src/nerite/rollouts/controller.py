"""Runs the rollouts of a server: routes, judges, versions that are kept loaded, state files, and what is told of it.

Decisions are made by ``Rollout``; here they take effect. For the loop's thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeAlias
from uuid import uuid4

from nerite.config.rollout_spec import RolloutSpec, spec_of
from nerite.core.errors import Conflict, NeriteError, NotFound, Unavailable
from nerite.core.failures import report
from nerite.core.work_loop import WorkLoop
from nerite.observability.exposition import Page
from nerite.observability.log import log
from nerite.rollouts import metrics
from nerite.rollouts.analysis import analysis_of
from nerite.rollouts.check import differences, refuse_if_blocked
from nerite.rollouts.declarations import Declarations, DeclaredRollout
from nerite.rollouts.difference import Difference
from nerite.rollouts.fleet_counts import table_of
from nerite.rollouts.fleet_order import FleetLead, FleetOrder, shared_spec
from nerite.rollouts.record import RolloutRecord
from nerite.rollouts.recording import RolloutRecording
from nerite.rollouts.rollout import RolloutCommand, RolloutDecision, RolloutReason, RolloutState
from nerite.rollouts.run import MAX_DIFFERENCES, RolloutRun
from nerite.rollouts.state_directory import StateWriter
from nerite.rollouts.versions import RolloutVersions
from nerite.rollouts.webhook import Webhooks
from nerite.routes.table import RouteTable
from nerite.server import InferenceServer

TICK: Final = 1.0
"""Seconds between two looks at the rollouts, and at the files beside the models. One holds the loop for less
than a millisecond for each rollout."""
_SAVE_EVERY: Final = 10
"""Ticks between two saves of evidence; decisions are saved at once."""
CLEAR: Final = "clear"
"""The command that forgets a rollout which has ended."""
COMMANDS: Final = (*map(str, RolloutCommand), CLEAR)
_STATE: Final = "the files with the state"
Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
_WARNED: Final = frozenset((RolloutState.ROLLED_BACK, RolloutState.ABORTED, RolloutState.INCONCLUSIVE))


class RolloutController:
    """The rollouts of a server, by model."""

    def __init__(
        self,
        server: InferenceServer,
        routes: RouteTable,
        writer: StateWriter,
        webhooks: Webhooks,
        executor: Executor,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._server = server
        self._routes = routes
        self._writer = writer
        self._webhooks = webhooks
        self._executor = executor
        self._clock = clock
        self._versions = RolloutVersions(server)
        self.loop = WorkLoop("rollouts")
        self.loop.on_discard = self._give_up
        self.loop.woken = self._begin_again
        self._records: dict[str, RolloutRecord] = {}
        self._declarations = Declarations(self._file_changed, self.loop)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """What is being done for a model beside the loop: its check, or what follows the end of its rollout."""
        self._set_aside: dict[str, tuple[RolloutRecord, str, Work]] = {}
        """Such work that was set aside, by its name as a unit of the loop."""
        self._ticks = 0
        self._boot = uuid4().hex[:12]
        """Distinguishes this process from earlier and later ones of the same server, whose counters begin at 0."""

    # Start and stop

    def restore(self, baselines: Mapping[str, str]) -> None:
        """Read the state files, before any model is loaded. Blocks.

        ``baselines`` are the versions that models serve of which no rollout is known yet.
        """
        for stored in self._writer.directory.read():
            if stored.problem:
                log.error(f"the state of a rollout is lost: {stored.problem}")
                continue
            try:
                self._records[stored.model] = RolloutRecord.of_json(stored.model, stored.document, self._clock())
            except (NeriteError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
                log.error(f"the state of the rollout of '{stored.model}' is lost: it has another form: {error}")
        for record in self._records.values():
            self._versions.keep_when_loaded(record)
        for model, baseline in baselines.items():
            if model not in self._records:
                self._versions.pin_when_loaded(model, baseline)

    async def start(self) -> None:
        """Go on with the rollouts, once the models are loaded and before the first request."""
        for record in self._records.values():
            run = record.active
            if run is None:
                continue
            self._record(run)
            log.info(f"the rollout of '{run.model}' from version {run.spec.baseline} to {run.spec.to} goes on")
            if run.rollout.state is RolloutState.CHECKING:
                self._begin_task(record, "check", partial(self._check, record, run))
            else:
                self._split(run)
        self._follow_files()
        found = await asyncio.to_thread(self._declarations.read)
        self._declarations.see(found)
        self._declarations.see(found)  # what is there at the start has settled

    async def run(self) -> None:
        """Look at the rollouts until cancelled."""
        while True:
            await asyncio.sleep(TICK)
            self._ticks += 1
            for record in list(self._records.values()):
                if self.loop.admits(record.model):
                    with self.loop.unit(record.model):
                        self._tick(record)
            with self.loop.step("the versions that are loaded"):
                self._versions.free_stuck(self._clock())
            with self.loop.step("the files of routes"):
                self._follow_files()
            if self.loop.admits(_STATE):
                with self.loop.step(_STATE):
                    self._write_rest()
            with self.loop.step("the rollouts that configurations declare"):
                self._declarations.see(await asyncio.to_thread(self._declarations.read))

    def _write_rest(self) -> None:
        """Write what could not be written. Raises ``Unavailable`` with the reason, so that it is tried less often."""
        self._writer.write_later()
        if self._writer.problem:
            raise Unavailable(self._writer.problem)

    def close(self) -> None:
        """Save the evidence so far. Blocks."""
        self._webhooks.close()
        for record in self._records.values():
            if record.active is not None:
                self._save(record)
                if record.active.recording is not None:
                    record.active.recording.close()
        self._writer.flush()

    # What clients ask

    def statuses(self) -> list[dict[str, Any]]:
        """Return the status of the last rollout of each model."""
        return [self._status(record) for _, record in sorted(self._records.items()) if record.run is not None]

    def past(self) -> list[dict[str, Any]]:
        """Return the last decision of each earlier rollout, without its evidence."""
        return [entry for _, record in sorted(self._records.items()) for entry in record.past()]

    def status(self, model: str) -> dict[str, Any]:
        """Return the status of a model's last rollout, with its evidence over time. Raises ``NotFound``."""
        record = self._known(model)
        assert record.run is not None
        return {**self._status(record), "curve": record.run.curve.as_json()}

    def history(self, model: str) -> list[dict[str, Any]]:
        """Return the decisions of a model's rollouts, the oldest first. Raises ``NotFound`` for an unknown model."""
        record = self._records.get(model)
        if record is None:
            self._server.manager.meant(model)
        return [] if record is None else list(record.history)

    async def begin(self, model: str, document: object) -> dict[str, Any]:
        """Start a rollout; return its status, without waiting for the check. Raises ``NeriteError``."""
        spec = spec_of(document)
        if spec.webhook:
            await self._webhooks.client.check_given(spec.webhook)
        return await self._begin(model, spec)

    async def command(self, model: str, command: str, *, force: bool = False) -> dict[str, Any]:
        """Carry out a command; return the status. Raises ``NeriteError``."""
        if command not in COMMANDS:
            raise NotFound(f"'{command}' is no command of a rollout. There are: {', '.join(COMMANDS)}")
        record = self._known(model)
        if command == CLEAR:
            return await self._clear(record)
        run = record.run
        assert run is not None
        now = self._clock()
        if run.lead is not None and run.active and command != RolloutCommand.ABORT:
            run.lead.ask(RolloutCommand(command), uuid4().hex[:12], now, force=force)
            return self._status(record)
        decision = run.rollout.command(RolloutCommand(command), run.findings(now), force=force)
        self._apply(record, decision)
        return self._status(record)

    async def follow(self, model: str, document: object) -> dict[str, Any]:
        """Take an order of a fleet command; return the status, without waiting for a check. Raises ``NeriteError``."""
        order = FleetOrder.of_json(document)
        record = self._records.get(model)
        run = None if record is None else record.run
        if record is None or run is None or run.lead is None or run.id != order.id:
            spec = shared_spec(order.rollout.spec)
            if order.declared:
                self._give_way(model, record, order, spec)
            record = await self._prepare(model, spec, order.id, order.started)
            run = record.run
            assert run is not None
            record.declared = spec.as_json() if order.declared else record.declared
            run.lead = FleetLead(order, self._clock())
            if order.rollout.state.is_end and not order.rollout.weight:
                self._follow(record, run, run.lead)
            else:  # also if it was promoted before
                self._begin_check(record, run)
        elif run.lead.hear(order, self._clock()):
            self._follow(record, run, run.lead)
            self._save(record)
        status = self._status(record)
        return {**status, "fleet": {**status["fleet"], "counts": table_of(run.counts())}}

    def _give_way(self, model: str, record: RolloutRecord | None, order: FleetOrder, spec: RolloutSpec) -> None:
        """End what a router's cluster file replaces. Raises ``Conflict`` if something else holds."""
        if file := self._declarations.path(model):
            raise Conflict(f"{file} asks for a rollout, too, beside the cluster file of the router: remove one of them")
        run = None if record is None else record.run
        if record is None or run is None:
            return
        if run.lead is not None and run.lead.order.declared:
            if order.term <= run.lead.order.term:
                raise Conflict(f"a router with a later cluster file leads the rollouts of '{model}'")
            if run.active:
                self._apply(record, run.rollout.supersede("the cluster file"))
        elif record.declared == spec.as_json():
            raise Conflict(f"a later rollout of '{model}' holds until the cluster file of the router changes")

    def analysis(self, model: str) -> dict[str, Any]:
        """Return what the judge of a model's last rollout says, for other tools. Raises ``NotFound``."""
        run = self._known(model).run
        assert run is not None
        return analysis_of(run)

    def check_route(self, model: str) -> None:
        """Raise ``Conflict`` if the route of a model is that of a rollout, which only the rollout may change."""
        record = self._records.get(model)
        if record is not None and record.active is not None:
            raise Conflict(
                f"a rollout of '{model}' is {record.active.rollout.state} and sets its weights: end it first"
            )

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of the rollouts."""
        metrics.write(page, [self._records[model] for model in sorted(self._records)], self._boot)

    # A rollout from its start to its end

    async def _begin(self, model: str, spec: RolloutSpec) -> dict[str, Any]:
        record = await self._prepare(model, spec, uuid4().hex[:12], _now())
        assert record.run is not None
        self._begin_check(record, record.run)
        return self._status(record)

    async def _prepare(self, model: str, spec: RolloutSpec, number: str, started: str) -> RolloutRecord:
        """Return the record of a model with a new rollout in it. Raises ``NeriteError`` if there cannot be one."""
        await self._settled(model)
        serving = self._versions.serving(model)
        spec = self._versions.complete(model, spec, serving)
        record = self._records.setdefault(model, RolloutRecord(model))
        if record.active is not None:
            raise Conflict(f"a rollout of '{model}' is {record.active.rollout.state}: promote or abort it first")
        if self._routes.get(model) is not None:
            raise Conflict(f"'{model}' has a route of its own, which decides its weights: remove its route.toml first")
        await asyncio.to_thread(self._writer.directory.prepare)
        if record.active is not None:
            raise Conflict(f"another rollout of '{model}' has just begun")
        record.run = RolloutRun(model, number, spec, started)
        record.run.loaded_before = self._versions.is_loaded(model, spec.to)
        return record

    def _begin_check(self, record: RolloutRecord, run: RolloutRun) -> None:
        spec = run.spec
        log.info(f"a rollout of '{run.model}' from version {spec.baseline} to {spec.to} begins with a check")
        self._record(run)
        self._save(record)
        self._begin_task(record, "check", partial(self._check, record, run))

    async def _check(self, record: RolloutRecord, run: RolloutRun) -> None:
        """Load the candidate and compare it with the baseline; begin the first step, or end the rollout."""
        spec = run.spec
        try:
            await self._versions.keep_baseline(run)
            found = await differences(self._server, run.model, spec.baseline, spec.to)
            run.differences = [each.as_json() for each in found][:MAX_DIFFERENCES]
            for each in found:
                log.info(f"rollout of '{run.model}': {_text(each)}")
            if not spec.force:
                refuse_if_blocked(found)
            await self._versions.keep_both(run)
            self._routes.check(run.route())
            blocked = ""
        except NeriteError as error:
            blocked = f"version {spec.to} was not rolled out: {error.message}"
        except Exception as error:
            failure = report("loop", error, f"in the check of version {spec.to} of model '{run.model}'")
            blocked = f"version {spec.to} was not rolled out: {failure.message}"
        if run.rollout.state is not RolloutState.CHECKING:
            return  # it was aborted
        if blocked:
            self._apply(record, run.rollout.block(blocked))
        elif run.lead is None:
            self._apply(record, run.rollout.begin(self._clock()))
        else:
            run.lead.checked = True
            self._follow(record, run, run.lead)

    def _follow(self, record: RolloutRecord, run: RolloutRun, lead: FleetLead) -> None:
        """Do what the fleet has ordered, as soon as the candidate has passed the check here."""
        rollout, target = run.rollout, lead.order.rollout
        if rollout.state is RolloutState.CHECKING and not lead.checked and target.weight:
            return  # the end of the check comes back to this
        if rollout.state.is_end and not target.state.is_end:
            return  # the fleet sees it, and decides what follows for all
        if target.step != rollout.step:
            rollout.requests_before = run.candidate.answered
        decision = rollout.follow(target, lead.order.text)
        if decision is not None:
            self._apply(record, decision)

    def _tick(self, record: RolloutRecord) -> None:
        if record.undone is not None:
            self._apply(record, record.undone)
        run = record.active
        if run is None or run.rollout.state is RolloutState.CHECKING:
            return
        now = self._clock()
        self._versions.look(run, now)
        run.shadow = self._routes.shadow_status(run.model) or run.shadow
        run.look_under_way(self._routes.under_way(run.model), now)
        decision = run.rollout.advance(now, run.findings(now), led=run.lead is not None)
        if decision is not None:
            self._apply(record, decision)
        elif self._ticks % _SAVE_EVERY == 0:
            self._save(record)
        if run.recording is not None:
            run.recording.flush()

    def _apply(self, record: RolloutRecord, decision: RolloutDecision) -> None:
        """Put a decision into effect, and tell of it."""
        run = record.run
        assert run is not None
        state = decision.state
        record.undone = decision
        if not state.is_end:
            if decision.reason in (RolloutReason.CHECKED, RolloutReason.HELD):
                run.begin_step(self._clock())
            self._split(run)
        elif self._routes.get(run.model) is not None:
            self._routes.put(run.route())
        if state.is_end:
            record.pinned = run.winner  # until it is settled, also if the server stops before that
            self._begin_task(record, "end", partial(self._end, record, run))
        record.undone = None
        entry = record.note(decision, _now())
        text = f"rollout of '{run.model}' from version {run.spec.baseline} to {run.spec.to}: {state}: {decision.text}"
        (log.warning if state in _WARNED else log.info)(text, rollout=run.id, reason=str(decision.reason))
        if run.spec.webhook:
            own = record.declared is not None and record.declared.get("webhook") == run.spec.webhook
            self._webhooks.send(run.spec.webhook, entry, own=own)
        self._save(record)

    def _split(self, run: RolloutRun) -> None:
        """Route requests by the present weights, and observe how they end."""
        self._routes.put(run.route())
        self._routes.observe(run.model, None if run.rollout.shadow else run.observe)

    async def _end(self, record: RolloutRecord, run: RolloutRun) -> None:
        """Make the winner the version that serves, remove the route, and unload the loser."""
        try:
            record.pinned = await self._versions.settle(
                run, partial(self._routes.remove, run.model), declared=record.declared is not None
            )
        except NeriteError as error:
            log.error(f"the versions of '{run.model}' could not be changed after its rollout: {error.message}")
        self._save(record)

    async def _clear(self, record: RolloutRecord) -> dict[str, Any]:
        if record.active is not None:
            raise Conflict(f"the rollout is {record.active.rollout.state}: promote or abort it first")
        await self._settled(record.model)
        await self._server.manager.release_versions(record.model)
        record.run, record.pinned = None, ""
        self._save(record)
        text = "the version policy chooses the version that serves again"
        log.info(f"rollout of '{record.model}' cleared: {text}")
        return {"model": record.model, "state": "cleared", "text": text}

    def _give_up(self, model: str) -> None:
        """Abort a rollout that was set aside; ``model`` may be the name of other work, which is not done then."""
        self._set_aside.pop(model, None)
        record = self._records.get(model)
        if record is not None and record.active is not None:
            self._apply(record, record.active.rollout.supersede("an operator, who discarded it after it had failed"))

    # Files beside the models

    def _follow_files(self) -> None:
        self._declarations.follow(dict(self._versions.directories()))

    def _file_changed(self, model: str, file: DeclaredRollout) -> None:
        (log.warning if file.problem else log.info)(file.news())
        spec = file.spec
        if file.problem or spec is None:
            return
        record = self._records.setdefault(model, RolloutRecord(model))
        if record.declared == spec.as_json():
            return
        record.declared = spec.as_json()
        self._save(record)
        self._begin_task(record, "declaration", partial(self._declared, record, spec))

    async def _declared(self, record: RolloutRecord, spec: RolloutSpec) -> None:
        """Do what the file beside a model asks for."""
        model = record.model
        run = record.active
        try:
            self._webhooks.client.check(spec.webhook)
            if run is not None:
                if replace(spec, baseline=spec.baseline or run.spec.baseline) == run.spec:
                    return
                self._apply(record, run.rollout.supersede())
            await self._settled(model)
            if self._versions.serving(model) == spec.to:
                log.info(f"'{model}' serves version {spec.to}, as its rollout file asks for")
                await self._server.manager.keep_versions(model, [int(spec.to)], default=int(spec.to))
                record.pinned = spec.to
                self._save(record)
            else:
                await self._begin(model, spec)
        except NeriteError as error:
            log.error(f"the rollout file of '{model}' was not acted on: {error.message}")

    # Helpers

    def _known(self, model: str) -> RolloutRecord:
        record = self._records.get(model)
        if record is None or record.run is None:
            self._server.manager.meant(model)
            raise NotFound(f"model '{model}' has no rollout. Start one with: nerite rollout start {model} --to VERSION")
        return record

    def _status(self, record: RolloutRecord) -> dict[str, Any]:
        assert record.run is not None
        document = {**record.run.status(), "pinned": record.pinned, "declared": record.declared, "fleet": None}
        if record.run.lead is not None:
            document["fleet"] = {**record.run.lead.status(self._clock()), "boot": self._boot}
        if self._writer.problem:
            document["problem"] = f"the state is not saved: {self._writer.problem}"
        return document

    def _record(self, run: RolloutRun) -> None:
        """Record what the judge is given from now on, if that was asked for."""
        if run.spec.record:
            run.recording = RolloutRecording(self._writer.directory.recording(run.model, run.id), self._executor)

    def _save(self, record: RolloutRecord) -> None:
        self._writer.save(record.model, record.as_json())

    def _begin_task(self, record: RolloutRecord, what: str, work: Work) -> None:
        """Do ``work`` after what is already being done for the model, unless that is the caller.

        It is done once more if it fails in a way that nothing foresaw, and set aside then.
        """
        before = self._tasks.get(record.model)
        waits = [] if before is None or before is asyncio.current_task() else [before]
        unit = f"{what} of '{record.model}'"

        async def run() -> None:
            if waits:
                await asyncio.wait(waits)
            while not self.loop.is_set_aside(unit):
                with self.loop.unit(unit):
                    await work()
                    return
                await asyncio.sleep(TICK)
            self._set_aside[unit] = record, what, work

        self.loop.forget(unit)
        task = self._tasks[record.model] = asyncio.get_running_loop().create_task(run())
        task.add_done_callback(lambda _: self._tasks.get(record.model) is task and self._tasks.pop(record.model))

    def _begin_again(self) -> None:
        """Do again what was set aside, and is so no more."""
        for unit in [unit for unit in self._set_aside if not self.loop.is_set_aside(unit)]:
            self._begin_task(*self._set_aside.pop(unit))

    async def _settled(self, model: str) -> None:
        """Wait until nothing is being done for a model, apart from the caller."""
        task = self._tasks.get(model)
        while task is not None and task is not asyncio.current_task():
            await asyncio.wait([task])
            task = self._tasks.get(model)


def _text(found: Difference) -> str:
    return f"{found.severity.value}: {found.subject}: {found.baseline} -> {found.candidate}: {found.consequence}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
