"""Fused steps, seen from the server: finds the steps that may follow a batch in its worker, and counts what they did.

See ``nerite.workers.child.fused``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nerite.core.errors import NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.response import EMPTY, InferenceResponse
from nerite.dispatch.interface import ServerEntry, VersionHandle
from nerite.ensembles.ensemble import StepRequest
from nerite.instances.instance import Batch
from nerite.scheduling.ensemble import GraphStep, StepPlan
from nerite.workers.child.fused import FusedStep, chain_to_json, runs_from_bytes

_MAX_PATHS: Final = 256
"""Maximum number of steps whose paths are remembered."""
_MAX_NUMBERS: Final = 4096
"""Maximum number of paths that a worker learns in its life; after that, steps go through the server one by one."""


@dataclass(frozen=True)
class FusedPath:
    """The steps that may follow another one in a worker."""

    number: int
    """Number by which the worker knows it."""
    steps: Sequence[GraphStep]
    versions: Sequence[VersionHandle]
    """Versions of the models of ``steps``."""

    @property
    def open(self) -> bool:
        """Whether it may be used: traced requests, and those to routes, go through the server one by one."""
        return not any(version.traced or version.routed for version in self.versions)

    def finish(
        self, batch: Batch, responses: Sequence[InferenceResponse | None], timings: ExecutionTimes, runs: memoryview
    ) -> Sequence[InferenceResponse | None]:
        """Count the executions of the steps, and record the last step of each request; return the final responses.

        ``timings`` are those of the batch itself. None stands for an empty response if a step gave it.
        """
        answers = list(responses)
        for run in runs_from_bytes(runs):
            timings.followed = True
            followers = [batch[index] for index in run.requests]
            self.versions[run.number - 1].followed(followers, run.rows, run.timings)
            for index in run.requests:
                request = batch[index]
                assert isinstance(request, StepRequest)
                request.run.add(run.timings)
                request.reached = self.steps[run.number - 1]
                if answers[index] is None:
                    answers[index] = EMPTY
        return answers


class FusedPaths:
    """The fused paths of one worker process. For the loop's thread only.

    Steps are fused if they run one after the other in one worker, and no other step and not the caller gets what they
    pass on. So a path can be left after any step: execution continues from there as without fusion.
    """

    def __init__(
        self,
        server: ServerEntry,
        seat_of: Callable[[VersionHandle], int | None],
        introduce: Callable[[int, dict[str, Any]], None],
    ) -> None:
        """``seat_of`` returns the seat of a version's instance in the worker; ``introduce`` sends a path to it."""
        self._server = server
        self._seat_of = seat_of
        self._introduce = introduce
        self._paths: dict[tuple[StepPlan, int], FusedPath | None] = {}
        self._numbers: dict[str, int] = {}
        """Number of each path that the worker knows, by its JSON."""

    def forget(self) -> None:
        """Discard all paths: an instance was added or removed."""
        self._paths.clear()

    def of(self, batch: Batch) -> FusedPath | None:
        """Return the steps that may follow a batch; None if there are none."""
        first = batch[0]
        if not isinstance(first, StepRequest):
            return None
        plan, step = first.start.plan, first.start.step
        for request in batch:
            if not isinstance(request, StepRequest) or not request.run.fusible:
                return None
            if request.start.plan is not plan or request.start.step is not step:
                return None
        key = plan, step.number
        if key not in self._paths:
            if len(self._paths) >= _MAX_PATHS:
                self._paths.clear()
            self._paths[key] = self._find(plan, step)
        path = self._paths[key]
        return path if path is not None and path.open else None

    def _find(self, plan: StepPlan, first: GraphStep) -> FusedPath | None:
        if self._member(first) is None:
            return None
        steps: list[FusedStep] = []
        versions: list[VersionHandle] = []
        for step in _successors(plan, first):
            found = self._member(step)
            if found is None:
                break
            seat, version = found
            steps.append(FusedStep(step, seat, version.label, version.max_rows))
            versions.append(version)
        if not steps:
            return None
        # A model that is loaded again, at the same seat, makes no difference to the worker.
        chain = chain_to_json(plan.signature.model_name, first, steps)
        described = json.dumps(chain)
        if described not in self._numbers:
            if len(self._numbers) >= _MAX_NUMBERS:
                return None
            self._numbers[described] = len(self._numbers) + 1
            self._introduce(self._numbers[described], chain)
        return FusedPath(self._numbers[described], [each.step for each in steps], versions)

    def _member(self, step: GraphStep) -> tuple[int, VersionHandle] | None:
        """Return seat and version of the model of a step; None if it cannot be fused in this worker."""
        try:
            version = self._server.find(step.model, step.version, "", step.namespace)
        except NeriteError:
            return None
        divided = version.routed or version.name != step.model  # the name is that of a route
        seat = self._seat_of(version) if version.fusible and not divided else None
        return None if seat is None else (seat, version)


def _successors(plan: StepPlan, first: GraphStep) -> Iterator[GraphStep]:
    """Yield the steps that may follow ``first`` one after the other, if they are in one worker.

    Each is the only consumer of what the step before it produces, and needs nothing else but inputs of ``first``.
    """
    step = first
    while True:
        produced = {tensor for _, tensor in step.outputs}
        takers = [each for each in plan.steps if any(tensor in produced for _, tensor in each.inputs)]
        if len(takers) != 1 or not produced.isdisjoint(plan.shared.union(plan.outputs)):
            return
        (step,) = takers
        if not all(tensor in produced or tensor in dict(first.inputs).values() for _, tensor in step.inputs):
            return
        yield step
