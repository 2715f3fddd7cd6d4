"""What may follow a batch in its worker: which models are there, and what they did, seen from the server."""

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

_MOST: Final = 256
"""Stretches that are remembered."""
_MOST_TOLD: Final = 4096
"""Stretches that a worker is told of in its life; what comes after that goes by the server, step by step."""


@dataclass(frozen=True)
class FusedPath:
    """A stretch, as one worker can go along it."""

    number: int
    """The worker knows it by this."""
    fused_segment: FusedSegment
    versions: Sequence[VersionHandle]
    """The models that follow."""

    @property
    def open(self) -> bool:
        """Whether it may be gone: what is traced goes step by step, so that each can be seen."""
        return not any(version.traced for version in self.versions)

    def gone(self, batch: Batch, along: FusedBatch) -> None:
        """Count what the models that followed did, and note how far each request is."""
        for run in along.runs:
            self.versions[run.step - 1].statistics.followed(len(run.requests), run.rows, run.timings)
            for index in run.requests:
                request = batch[index]
                assert isinstance(request, StepRequest)
                request.run.followed(run.timings)
        for request, reached in zip(batch, along.reached, strict=True):
            assert isinstance(request, StepRequest)
            request.reached = self.fused_segment.steps[reached]


class FusedPaths:
    """Those of one worker process. For the loop's thread only."""

    def __init__(
        self, server: ServerEntry, channel: WorkerChannel, seat_of: Callable[[VersionHandle], int | None]
    ) -> None:
        """``seat_of`` finds the instance of a version in the worker."""
        self._server = server
        self._channel = channel
        self._seat_of = seat_of
        self._ways: dict[FusedSegment, FusedPath | None] = {}
        self._told: dict[str, int] = {}
        """What the worker knows, as it was told, and by which number."""

    def forget(self) -> None:
        """Find everything anew: somebody came or left."""
        self._ways.clear()

    def of(self, batch: Batch) -> FusedPath | None:
        """Return what may follow a batch, if something may."""
        fused_segment = batch[0].fused_segment
        if fused_segment is None or any(request.fused_segment is not fused_segment for request in batch):
            return None
        if fused_segment not in self._ways:
            if len(self._ways) >= _MOST:
                self._ways.clear()
            self._ways[fused_segment] = self._find(fused_segment)
        way = self._ways[fused_segment]
        return way if way is not None and way.open else None

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
                    "most": version.most_rows,
                }
            )
        if not versions:
            return None
        # A model that is loaded again, at the same seat, makes no difference to the worker.
        said = json.dumps(hops)
        if said not in self._told:
            if len(self._told) >= _MOST_TOLD:
                return None
            self._told[said] = len(self._told) + 1
            self._channel.introduce(self._told[said], hops)
        return FusedPath(self._told[said], fused_segment, versions)
