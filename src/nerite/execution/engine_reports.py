"""Engine reports as they lie in a message.

First how the engine is; then for each request that the step has brought forward its batch and index, how it ended, the
tokens that are new, and what is told once, when it begins.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nerite.core.engine_report import Begun, Ended, EngineReport, Progress
from nerite.execution import messages

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest
    from nerite.execution.runner import Batch

_STATE: Final = struct.Struct("<9I4x5Q")
_PROGRESS: Final = struct.Struct("<IHHIIIII4xQ")
_UNKNOWN: Final = 2**64 - 1
_ENDED: Final = (None, *Ended)
_PLACE: Final = {ended: place for place, ended in enumerate(_ENDED)}


def frame(seat: int, report: EngineReport, place: Callable[[InferenceRequest], tuple[int, int] | None]) -> bytes:
    """Return the message; ``place`` gives batch and index of a request, None for one that is not known any more."""
    counts = (_UNKNOWN if count is None else count for count in report[9:14])
    parts = [_STATE.pack(*report[:9], *counts)]
    for request, tokens, begun, ended in report.progress:
        found = place(request)
        if found is None:
            continue
        at_ns, prompt, cached, sequences, images = begun or (0, 0, 0, 0, 0)
        parts.append(_PROGRESS.pack(*found, _PLACE[ended], tokens, sequences, prompt, cached, images, at_ns))
    return messages.frame(messages.REPORT, b"".join(parts), seat)


def read(body: memoryview, batch_of: Callable[[int], Batch | None]) -> EngineReport:
    """Return the report; ``batch_of`` gives the requests of a batch."""
    running, waiting, total, free, size, context, most, patience, failures, *counts = _STATE.unpack_from(body)
    queries, hits, preempted, drafted, accepted = (None if count == _UNKNOWN else count for count in counts)
    progress = []
    for number, index, ended, tokens, sequences, prompt, cached, images, at_ns in _PROGRESS.iter_unpack(
        body[_STATE.size :]
    ):
        batch = batch_of(number)
        if batch is not None and index < len(batch):
            begun = Begun(at_ns, prompt, cached, sequences, images) if sequences else None
            progress.append(Progress(batch[index], tokens, begun, _ENDED[ended]))
    state = (running, waiting, total, free, size, context, most, patience, failures)
    return EngineReport(*state, queries, hits, preempted, drafted, accepted, progress)
