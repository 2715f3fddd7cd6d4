"""The versions of a rollout as the server has them: loaded, kept, ready, and what they use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from nerite.config.loading import select_versions
from nerite.config.model_config import ModelVersionPolicy
from nerite.config.rollout_spec import RolloutSpec
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.judge.gates import LimitGate
from nerite.models.running_version import RunningVersion
from nerite.repository.catalogue import ModelRecord
from nerite.rollouts.record import RolloutRecord
from nerite.rollouts.rollout import RolloutState
from nerite.rollouts.run import ArmGauges, RolloutRun
from nerite.server import InferenceServer

_UNKNOWN: Final = ArmGauges()
_STUCK_NS: Final = 10_000_000_000
"""Time without progress after which a version that was rolled back counts as stuck."""
_NO_PROGRESS: Final = (-1, -1)


class RolloutVersions:
    """Loads, keeps and looks at the versions of rollouts. For the loop's thread."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._leaving: dict[RunningVersion, tuple[tuple[int, int], int]] = {}
        """Versions that were rolled back and are unloaded: their progress, and when it was first seen."""

    def serving(self, model: str) -> str:
        """Return the version that serves requests which name none. Raises Triton's errors."""
        record = self._record(model)
        return str(record.find("").version)

    def complete(self, model: str, spec: RolloutSpec, serving: str) -> RolloutSpec:
        """Return the specification with a baseline, which is ``serving`` if none was given. Raises ``NeriteError``."""
        self._record(model)
        spec = spec if spec.baseline else replace(spec, baseline=serving)
        if spec.to == spec.baseline:
            raise InvalidArgument(f"to: version {spec.to} of '{model}' serves already: name another version")
        return spec

    def is_loaded(self, model: str, version: str) -> bool:
        """Return whether a version is loaded."""
        return self._running(model, version) is not None

    def directories(self) -> Iterator[tuple[str, Path]]:
        """Yield the models with the directories of their files."""
        for record in self._server.manager.records:
            if record.loaded is not None and not record.namespace:
                yield record.name, record.loaded.polled.directory

    def keep_when_loaded(self, record: RolloutRecord) -> None:
        """Load what a rollout needs, and serve what it has left, from the first load of the model on."""
        keeps = record.keeps()
        if keeps is not None:
            self._server.manager.keep_when_loaded(record.model, *keeps)

    def pin_when_loaded(self, model: str, version: str) -> None:
        """Serve a version from the first load of the model on."""
        self._server.manager.keep_when_loaded(model, (int(version),), int(version))

    async def keep_baseline(self, run: RolloutRun) -> None:
        """Keep the baseline, and have it serve whatever else is loaded. Raises ``NeriteError``."""
        baseline = int(run.spec.baseline)
        await self._server.manager.keep_versions(run.model, (baseline,), default=baseline)

    async def keep_both(self, run: RolloutRun) -> None:
        """Load both versions of a rollout and keep them; the baseline serves. Raises ``NeriteError``."""
        baseline, candidate = int(run.spec.baseline), int(run.spec.to)
        await self._server.manager.keep_versions(run.model, (baseline, candidate), default=baseline)

    async def settle(self, run: RolloutRun, unroute: Callable[[], None], *, declared: bool) -> str:
        """Make the winner the version that serves, and unload the other if it is loaded for the rollout only.

        Returns the winner if it is pinned: if the version policy would choose another one, or if the model's rollout
        file is to decide (``declared``). ``unroute`` is called when the winner serves. Raises ``NeriteError``.
        """
        manager, model, winner = self._server.manager, run.model, int(run.winner)
        promoted = run.rollout.state is RolloutState.PROMOTED
        await manager.keep_versions(model, (winner,), default=winner)
        loser = self._running(model, run.loser)
        if loser is not None and not promoted:
            self._server.hand_back(loser, "was rolled back")
        unroute()
        selected = self._selected(model)
        if promoted and winner == max(selected, default=0):
            await manager.release_versions(model)
            if not declared:
                return ""
            manager.keep_when_loaded(model, (winner,), winner)
        elif not promoted and not run.loaded_before:
            # Otherwise a newer version would start to serve, which no client requested.
            newer = (version for version in self._record(model).running if version > winner)
            await manager.release_versions(model, without={int(run.loser), *newer})
            if loser is not None:
                self._leaving[loser] = _NO_PROGRESS, 0
            if not self._exists(model, run.loser):
                return ""  # there was nothing to roll out
            manager.keep_when_loaded(model, (winner,), winner)
        return run.winner

    def free_stuck(self, now_ns: int) -> None:
        """Kill the workers of versions that were rolled back and are stuck; the winner answers what they have."""
        for running, (before, since_ns) in list(self._leaving.items()):
            progress = running.progress
            if not running.in_flight:
                del self._leaving[running]
            elif progress != before:
                self._leaving[running] = progress, now_ns
            elif now_ns - since_ns >= _STUCK_NS:
                running.kill_busy("it was stuck when its version was rolled back")
                self._leaving[running] = progress, now_ns

    def look(self, run: RolloutRun, now_ns: int) -> None:
        """Ask whether both versions are ready, and read the gauges that the gates compare."""
        for version in (run.spec.baseline, run.spec.to):
            try:
                self._server.ask_model_ready(run.model, version, run.answer_of(version))
            except NeriteError:
                run.answer_of(version)(False)
        candidate, baseline = (self._running(run.model, version) for version in (run.spec.to, run.spec.baseline))
        if candidate is not None and baseline is not None:
            run.load(_load(candidate), _load(baseline), now_ns)
        if any(isinstance(gate, LimitGate) for gate in run.judge.gates):
            run.gauge(_gauges(candidate), _gauges(baseline), now_ns)

    def _record(self, model: str) -> ModelRecord:
        record = self._server.manager.meant(model)
        if record.namespace:
            raise Unsupported(f"model '{model}' is in a namespace: rollouts need a server without namespacing")
        return record

    def _selected(self, model: str) -> tuple[int, ...]:
        """Return the versions that the version policy selects."""
        loaded = self._record(model).loaded
        if loaded is None:
            return ()
        policy = loaded.polled.config.version_policy or ModelVersionPolicy(
            latest=ModelVersionPolicy.Latest(num_versions=1)
        )
        return select_versions(policy, loaded.polled.existing, model).numbers

    def _exists(self, model: str, version: str) -> bool:
        """Return whether a version has files."""
        loaded = self._record(model).loaded
        if loaded is None:
            return False
        return int(version) in loaded.polled.existing or (loaded.polled.directory / version).is_dir()

    def _running(self, model: str, version: str) -> RunningVersion | None:
        try:
            return self._record(model).running.get(int(version))
        except NeriteError:
            return None


def _load(running: RunningVersion) -> float:
    """Return the number of requests per instance that wait or run."""
    return running.in_flight / max(1, len(running.instances))


def _gauges(running: RunningVersion | None) -> ArmGauges:
    """Return the readings of a version."""
    if running is None:
        return _UNKNOWN
    reports = [instance.report for instance in running.instances if instance.report is not None]
    total = sum(report.total_blocks for report in reports)
    headroom = sum(report.free_blocks for report in reports) / total if total else math.nan
    return ArmGauges(headroom, float(running.memory or math.nan), float(running.restarts))
