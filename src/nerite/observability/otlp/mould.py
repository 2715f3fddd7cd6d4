"""The spans of usual requests, cast in a mould: ran once, answered once, under no other span of ours, without an error.

Their messages differ in times and ids alone, which have fixed sizes. So what ``spans_of`` makes of one of them is kept,
and of the next ones only those are put in their places, in columns: of many at once.
"""

from __future__ import annotations

import copy
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from nerite.core.byte_budget import TRACES, Memo
from nerite.core.marks import Marks
from nerite.core.trace_context import TraceContext
from nerite.observability.otlp import wire
from nerite.observability.otlp.spans import spans_of
from nerite.observability.spanned_trace import USUAL_SPANS, SpannedTrace
from nerite.wire.fields import varint

_MOULD: Final = 16 * 1024
"""Bytes that a mould takes in memory beside its text."""
_TIMES: Final = 12
_EPOCH: Final = 0x1122334455000000
"""What no message has by chance, nor with any small number added to it."""
_TRACE_ID: Final = 0x5AA5C33C69960FF0A5553AAAC99C7117
_SPAN_ID: Final = 0x39C6A55A00F00000
_PARENT: Final = 0x6A95C33A0FF05AA5
_LEADER: Final = TraceContext(0x33CC0FF0965A69A5AA556996F00FC33C, 0x0F5A96C3)


class Mould:
    """What the spans of like requests have in common, and where they differ."""

    def __init__(self, like: SpannedTrace) -> None:
        """``like`` is one of them."""
        number = wire.attribute(9, "triton.trace_id", like.number)
        name = wire.attribute(9, "triton.request_id", like.id) if like.id else b""
        link = wire.link(_LEADER.trace_id, _LEADER.span_id)
        self._number = number.removesuffix(varint(like.number))
        self._name = name.removesuffix(like.id.encode())
        # In the order of the columns below.
        values: list[tuple[bytes, str]] = [((_EPOCH + at).to_bytes(8, "little"), "<i8") for at in range(1, _TIMES + 1)]
        values += [((_SPAN_ID + span).to_bytes(8), ">u8") for span in range(USUAL_SPANS)]
        values += [(_PARENT.to_bytes(8), ">u8"), (_TRACE_ID.to_bytes(16), "V16")]
        values += [(text, f"V{len(text)}") for text in (number, name, link)]
        places = {value: place for place, (value, _) in enumerate(values) if value}
        self._text = spans_of(_stand_in(like), _EPOCH)
        found = [*re.finditer(b"|".join(map(re.escape, places)), self._text)]
        self._fields = [(str(match.start()), places[match[0]]) for match in found]
        self._layout = np.dtype(
            {
                "names": [name for name, _ in self._fields],
                "formats": [values[place][1] for _, place in self._fields],
                "offsets": [match.start() for match in found],
                "itemsize": len(self._text),
            }
        )
        texts = {"number": len(number), "name": len(name) or 1, "link": len(link)}
        self._pack = struct.Struct(f"<{_TIMES}qQQ16s" + "".join(f"{size}s" for size in texts.values())).pack
        numbers = [("times", "<i8", _TIMES), ("span", "<u8"), ("parent", "<u8"), ("trace", "V16")]
        self._given = np.dtype([*numbers, *((text, f"V{size}") for text, size in texts.items())])

    @property
    def footprint(self) -> int:
        """Bytes that it takes in memory, about."""
        return _MOULD + 2 * len(self._text)

    def cast(self, traces: Sequence[SpannedTrace], epoch: int) -> bytes:
        """Return the spans of traces that are like the first."""
        given = np.frombuffer(b"".join(map(self._packed, traces)), self._given)
        span = given["span"]
        texts = (given["number"], given["name"], given["link"])
        columns = [*(given["times"] + epoch).T, *(span + number for number in range(USUAL_SPANS))]
        columns += [given["parent"], given["trace"], *texts]
        rows = np.frombuffer(bytearray(self._text * len(traces)), self._layout)
        for field, place in self._fields:
            rows[field] = columns[place]
        return rows.tobytes()

    def _packed(self, trace: SpannedTrace) -> bytes:
        """Return what a trace has of its own, as ``_given`` has it."""
        ((queued_ns, marks),) = trace.executions
        assert marks is not None
        leader = marks.leader
        return self._pack(
            trace.first_ns,
            trace.received_ns,
            trace.began_ns,
            queued_ns,
            marks.started_ns,
            marks.inputs_ready_ns,
            marks.computed_ns,
            marks.ended_ns,
            trace.ended_ns,
            trace.answered_ns,
            *trace.sends,
            trace.span_id,
            trace.parent_span,
            trace.trace_id.to_bytes(16),
            self._number + varint(trace.number),
            self._name + trace.id.encode(),
            b"" if leader is None else wire.link(leader.trace_id, leader.span_id),
        )


class Foundry:
    """Makes spans of traces, and keeps moulds. For one thread."""

    def __init__(self) -> None:
        self._moulds: Memo[Sequence[object], Mould] = Memo()

    def spans_of(self, traces: Iterable[SpannedTrace], epoch: int) -> bytes:
        """Return the spans of traces, in any order; ``epoch`` as for those of any."""
        made: list[bytes] = []
        alike: dict[Sequence[object], list[SpannedTrace]] = {}
        for trace in traces:
            marks = _usual(trace)
            if marks is None:
                made.append(spans_of(trace, epoch))
                continue
            key = (
                trace.header.model_name,
                trace.version,
                trace.protocol,
                marks.requests,
                (trace.number.bit_length() + 6) // 7,
                len(trace.id),
                trace.parent_span > 0,
                marks.leader is not None and _is_led(trace, marks),
            )
            alike.setdefault(key, []).append(trace)
        for like, those in alike.items():
            mould = self._moulds.get(like)
            if mould is None:
                mould = Mould(those[0])
                TRACES.put(self._moulds, like, mould, mould.footprint)
            made.append(mould.cast(those, epoch))
        return b"".join(made)


def _usual(trace: SpannedTrace) -> Marks | None:
    """Return the times of the one execution of a trace that is like most; None if it is not."""
    if (
        len(trace.executions) != 1
        or len(trace.sends) != 2
        or trace.parent
        or trace.error is not None
        or trace.state
        or trace.attributes
        or trace.last_part is not None
        or not trace.id.isascii()
    ):
        return None
    ((queued_ns, marks),) = trace.executions
    if marks is None or not queued_ns <= marks.started_ns:
        return None
    # The ends of spans are those of the last that happens in them.
    return marks if trace.ended_ns <= trace.final_ns == trace.sends[0] <= trace.sends[1] else None


def _is_led(trace: SpannedTrace, marks: Marks) -> bool:
    """Return whether another request of the batch is linked."""
    return marks.leader is not None and marks.leader.span_id != trace.compute_span(0)


def _stand_in(like: SpannedTrace) -> SpannedTrace:
    """Return a trace that says the same, with times and ids that can be found again."""
    trace = copy.copy(like)
    ((_, given),) = like.executions
    assert given is not None
    trace.first_ns, trace.received_ns, trace.began_ns = 1, 2, 3
    marks = Marks()
    marks.requests = given.requests
    marks.leader = _LEADER if _is_led(like, given) else None
    marks.started_ns, marks.inputs_ready_ns, marks.computed_ns, marks.ended_ns = 5, 6, 7, 8
    trace.executions = [(4, marks)]
    trace.ended_ns, trace.answered_ns = 9, 10
    trace.final_ns = 11
    trace.sends = [11, 12]
    trace._trace_id, trace._span_id = _TRACE_ID, _SPAN_ID
    trace.parent_span = _PARENT if like.parent_span else 0
    return trace
