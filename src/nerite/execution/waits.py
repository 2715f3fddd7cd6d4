"""Calls that could only be answered by an instance that waits for them: found when they arise, and refused."""

from __future__ import annotations

from collections.abc import Sequence

from nerite.core.child_request import CallRequest
from nerite.core.errors import Unavailable
from nerite.core.request import InferenceRequest, ServedVersion
from nerite.scheduling.waiting import deadlocked, ring


def relieve(request: InferenceRequest) -> None:
    """If ``request`` waits for ever, with others that wait for each other, refuse a call that is part of that."""
    start = request.origin
    if not deadlocked(start, _ways):
        return
    waiting = ring(start, _ways)
    models = " -> ".join(each.header.model_name for each in waiting)
    for each in waiting:
        if isinstance(each, CallRequest) and not _version(each).begun(each):
            each.refuse(
                Unavailable(
                    f"model '{each.header.model_name}' can never answer this call: each model waits for the next in "
                    f"{models}\n    Give one of them more instances (instance_group {{ count }}), or have them call in "
                    "one direction only."
                )
            )
            return


def _ways(request: InferenceRequest) -> Sequence[InferenceRequest]:
    return _version(request).waits_for(request)


def _version(request: InferenceRequest) -> ServedVersion:
    assert request.header.route is not None, "a request that waits was submitted"
    return request.header.route[1]
