"""Warming instances up: each answers the model's samples before it takes requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.core.internal_errors import report
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.execution.instance_plan import InstancePlan
from nerite.execution.rehearsal import Rehearsal
from nerite.execution.runner import Batch, Runner
from nerite.execution.runner_makers import RunnerMaker
from nerite.execution.warm_up_data import Sample
from nerite.observability.load_times import stage

_log = logging.getLogger("nerite.execution")


class WarmMaker:
    """Makes instances by another maker, and warms them up, side by side. A ``RunnerMaker``."""

    def __init__(
        self,
        maker: RunnerMaker,
        model: str,
        samples: Sequence[Sample],
        rehearsal: Callable[[], Rehearsal] | None = None,
    ) -> None:
        """``rehearsal`` makes what an instance of a model with sequences needs."""
        self._maker = maker
        self._model = model
        self._samples = samples
        self._rehearsal = rehearsal

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[Runner]:
        """Make instances that have answered every sample. If one fails, none is left."""
        runners = await self._maker.make(plans, config)
        with stage("warm-up"):
            outcomes = await asyncio.gather(*map(self._warm_up, runners), return_exceptions=True)
        failure = next((outcome for outcome in outcomes if outcome is not None), None)
        if failure is not None:
            await asyncio.gather(*map(_closed, runners))
            raise failure
        return runners

    def close(self) -> None:
        """Give back what the instances shared."""
        self._maker.close()

    async def _warm_up(self, runner: Runner) -> None:
        rehearsal = None if self._rehearsal is None else self._rehearsal()
        for sample in self._samples:
            for iteration in range(1, sample.times + 1):
                _log.debug(
                    "model '%s' instance %s is running warmup sample '%s' for iteration %d",
                    self._model,
                    runner.name,
                    sample.name,
                    iteration,
                )
                await _Trial(runner, rehearsal).run(sample)


class _Trial:
    """One batch of a sample on one instance. The sink of its requests."""

    def __init__(self, runner: Runner, rehearsal: Rehearsal | None) -> None:
        self._runner = runner
        self._rehearsal = rehearsal
        self._errors: list[NeriteError] = []
        self._open = 0
        """Requests without their last answer."""
        self._running = False
        """The instance has a batch: a model may send the last answer before it returns."""
        self._over = asyncio.Event()
        runner.done = self._done
        runner.part = self._part
        runner.on_usable = lambda _: None

    async def run(self, sample: Sample) -> None:
        """Return when every request has its last answer. Raises ``NeriteError`` if one is an error."""
        if not self._runner.usable:
            raise self._died()
        batch = sample.requests(self, time.monotonic_ns())
        self._open = len(batch)
        if self._rehearsal is not None:
            batch = self._rehearsal.begin(batch, sample.said)
        self._hand_over(batch)
        await self._over.wait()
        if self._errors:
            reasons = "".join(f"{error.message}; " for error in dict.fromkeys(self._errors))
            raise InvalidArgument(f"failed to run warmup sample '{sample.name}': {reasons}")

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take an answer."""
        if response.error is not None:
            self._errors.append(response.error)
        if final:
            self._open -= 1
            self._check_over()

    def _check_over(self) -> None:
        if not self._open and not self._running:
            self._over.set()

    def _done(
        self, runner: Runner, batch: Batch, responses: Sequence[InferenceResponse | None], marks: Marks | None
    ) -> None:
        self._running = False
        again: Batch = []
        for request, response in zip(batch, responses, strict=True):
            if response is None:
                continue
            rest = self._settled(request, response)
            if response.again:
                again.append(request)
            else:
                request.respond(rest)
        if again:  # not at once: one that runs on the loop would never come back
            asyncio.get_running_loop().call_soon(self._run_again, again)
        self._check_over()

    def _part(self, request: InferenceRequest, response: InferenceResponse, final: bool, marks: Marks | None) -> None:
        rest = self._settled(request, response)
        if final or not rest.empty:
            request.respond(rest, final)

    def _settled(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse:
        return response if self._rehearsal is None else self._rehearsal.settle(request, response)

    def _run_again(self, batch: Batch) -> None:
        assert self._rehearsal is not None, "only models of iterative sequences want a request once more"
        for request in batch:
            self._rehearsal.again(request)
            if not self._runner.usable:
                request.respond(InferenceResponse.failed(self._died()))
        if self._runner.usable:
            self._hand_over(batch)

    def _hand_over(self, batch: Batch) -> None:
        self._running = True
        try:
            self._runner.run(batch)
        except Exception as error:
            self._running = False
            failure = report("dispatcher", error, f"while instance '{self._runner.name}' was warmed up")
            for request in batch:
                request.respond(InferenceResponse.failed(failure))

    def _died(self) -> NeriteError:
        return Unavailable(f"instance '{self._runner.name}' died")


async def _closed(runner: Runner) -> None:
    """Close an instance, and return when that is done."""
    done = asyncio.Event()
    runner.close(done.set)
    await done.wait()
