"""A trace as Triton writes it: JSON objects with a comma between them, in the order in which things happened."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Final

import orjson

from nerite.observability.trace import Trace

RECEIVED: Final = {
    "HTTP": ("HTTP_RECV_START", "HTTP_RECV_END"),
    "GRPC": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
}
SENT: Final = {"HTTP": ("HTTP_SEND_START", "HTTP_SEND_END"), "GRPC": ("GRPC_SEND_START", "GRPC_SEND_END")}
_when = itemgetter(0)


def moments(trace: Trace) -> list[tuple[int, str]]:
    """Return when what happened, in that order."""
    found: list[tuple[int, str]] = []
    if trace.protocol:
        found += zip((trace.first_ns, trace.received_ns), RECEIVED[trace.protocol], strict=True)
    found.append((trace.began_ns, "REQUEST_START"))
    for queued_ns, marks in trace.executions:
        found.append((queued_ns, "QUEUE_START"))
        if marks is not None:
            found += (
                (marks.started_ns, "COMPUTE_START"),
                (marks.inputs_ready_ns, "COMPUTE_INPUT_END"),
                (marks.computed_ns, "COMPUTE_OUTPUT_START"),
                (marks.ended_ns, "COMPUTE_END"),
            )
    if trace.ended_ns:
        found.append((trace.ended_ns, "REQUEST_END"))
    if trace.answered_ns and not trace.parent:
        found.append((trace.answered_ns, "INFER_RESPONSE_COMPLETE"))
    if trace.sends:
        found += zip(trace.sends, SENT[trace.protocol] * (len(trace.sends) // 2), strict=True)
    found.sort(key=_when)
    return found


def written(trace: Trace) -> bytes:
    """Return a trace as text."""
    number = trace.number
    if trace.tensors is None:
        stamps = [f'{{"id":{number},"timestamps":[{{"name":"{name}","ns":{ns}}}]}}' for ns, name in moments(trace)]
        return b",".join((orjson.dumps(_first(trace)), ",".join(stamps).encode()))
    notes: list[tuple[int, dict[str, Any]]] = [
        (ns, {"activity": activity, "tensor": tensor}) for ns, activity, tensor in trace.tensors
    ]
    first = []
    if "TIMESTAMPS" in trace.sampler.values.levels:
        first.append(_first(trace))
        notes = [*((ns, {"timestamps": [{"name": name, "ns": ns}]}) for ns, name in moments(trace)), *notes]
        notes.sort(key=_when)
    return b",".join(map(orjson.dumps, [*first, *({"id": number, **record} for _, record in notes)]))


def _first(trace: Trace) -> dict[str, Any]:
    first: dict[str, Any] = {
        "id": trace.number,
        "model_name": trace.header.model_name,
        "model_version": trace.version,
    }
    if trace.id:
        first["request_id"] = trace.id
    if trace.parent:
        first["parent_id"] = trace.parent
    return first
