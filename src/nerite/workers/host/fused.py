"""Fused steps, seen from the server: finds which models may follow a batch in its worker, and counts what they did."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from nerite.core.errors import NeriteError
from nerite.dispatch.interface import ServerEntry, VersionHandle
from nerite.ensembles.ensemble import StepRequest
from nerite.instances.instance import Batch
from nerite.scheduling import fused_steps
from nerite.scheduling.ensemble import FusedSegment
from nerite.workers.host.channel import WorkerChannel
from nerite.workers.ipc.messages import FusedBatch

_MAX_COUNT: Final = 256
"""Maximum number of segments whose paths are remembered."""
_MAX_TOLD: Final = 4096
"""Maximum number of paths that a worker is told of in its life; after that, steps go through the server one by one."""


@dataclass(frozen=True)
class FusedPath:
    """The part of a fused segment that one worker can execute."""

    number: int
    """Number by which the worker knows it."""
    fused_segment: FusedSegment
    versions: Sequence[VersionHandle]
    """Versions of the models that follow."""

    @property
    def open(self) -> bool:
        """Whether it may be used: traced requests go through the server, so that each step is visible."""
        return not any(version.traced for version in self.versions)

    def gone(self, batch: Batch, fused: FusedBatch) -> None:
        """Count the executions of the models that followed, and record the last step of each request."""
        for run in fused.runs:
            self.versions[run.step - 1].statistics.followed(len(run.requests), run.rows, run.timings)
            for index in run.requests:
                request = batch[index]
                assert isinstance(request, StepRequest)
                request.run.followed(run.timings)
        for request, reached in zip(batch, fused.reached, strict=True):
            assert isinstance(request, StepRequest)
            request.reached = self.fused_segment.steps[reached]


class FusedPaths:
    """The fused paths of one worker process. For the loop's thread only."""

    def __init__(
        self, server: ServerEntry, channel: WorkerChannel, seat_of: Callable[[VersionHandle], int | None]
    ) -> None:
        """``seat_of`` returns the seat of a version's instance in the worker."""
        self._server = server
        self._channel = channel
        self._seat_of = seat_of
        self._ways: dict[FusedSegment, FusedPath | None] = {}
        self._told: dict[str, int] = {}
        """Number of each path that the worker was told of, by its JSON."""

    def forget(self) -> None:
        """Discard all paths: an instance was added or removed."""
        self._ways.clear()

    def of(self, batch: Batch) -> FusedPath | None:
        """Return the fused steps that may follow a batch; None if it has none."""
        fused_segment = batch[0].fused_segment
        if fused_segment is None or any(request.fused_segment is not fused_segment for request in batch):
            return None
        if fused_segment not in self._ways:
            if len(self._ways) >= _MAX_COUNT:
                self._ways.clear()
            self._ways[fused_segment] = self._find(fused_segment)
        path = self._ways[fused_segment]
        return path if path is not None and path.open else None

    def _find(self, fused_segment: FusedSegment) -> FusedPath | None:
        versions: list[VersionHandle] = []
        hops: list[dict[str, object]] = []
        for link in fused_segment.links:
            try:
                version = self._server.find(link.signature.model_name, link.version, "", link.namespace)
            except NeriteError:
                break
            seat = self._seat_of(version)
            if seat is None or not version.worker:
                break
            versions.append(version)
            hops.append(
                {
                    "link": fused_steps.link_to_json(link),
                    "seat": seat,
                    "version": version.label,
                    "most": version.max_rows,
                }
            )
        if not versions:
            return None
        # A model that is loaded again, at the same seat, makes no difference to the worker.
        described = json.dumps(hops)
        if described not in self._told:
            if len(self._told) >= _MAX_TOLD:
                return None
            self._told[described] = len(self._told) + 1
            self._channel.introduce(self._told[described], hops)
        return FusedPath(self._told[described], fused_segment, versions)
