"""The spans of usual requests, cast in a mould: ran once, answered once, under no other span of ours, without an error.

Their messages differ in times and ids alone, which have fixed sizes. So what ``spans_of`` makes of one of them is kept,
and of the next ones only those are put in their places, all in one go. It costs a quarter.
"""

from __future__ import annotations

import copy
import re
import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

from nerite.core.marks import Marks
from nerite.core.trace_context import TraceContext
from nerite.observability.otlp import wire
from nerite.observability.otlp.spans import spans_of
from nerite.observability.spanned_trace import SpannedTrace

_MOST: Final = 256
"""Moulds that are kept."""
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
        ids = [_SPAN_ID + span for span in range(like.spans)]
        # In the order of ``_values``.
        values: list[tuple[bytes, str]] = [((_EPOCH + at).to_bytes(8, "little"), "Q") for at in range(1, _TIMES + 1)]
        values += [(each.to_bytes(8), "8s") for each in (*ids, _PARENT)]
        values += [(_TRACE_ID.to_bytes(16), "16s"), (number, f"{len(number)}s"), (name, f"{len(name)}s")]
        link = wire.link(_LEADER.trace_id, _LEADER.span_id)
        values.append((link, f"{len(link)}s"))
        places = {value: place for place, (value, _) in enumerate(values) if value}
        pieces = re.split(b"(%b)" % b"|".join(map(re.escape, places)), spans_of(_stand_in(like), _EPOCH))
        found = [places[piece] for piece in pieces[1::2]]
        layout = [f"{len(piece)}s" if index % 2 == 0 else "" for index, piece in enumerate(pieces)]
        layout[1::2] = [values[place][1] for place in found]
        self._pack = struct.Struct("<" + "".join(layout)).pack
        self._pieces: list[Any] = list(pieces)
        self._ordered = itemgetter(*found)

    def cast(self, trace: SpannedTrace, epoch: int) -> bytes:
        """Return the spans of a trace that is like the first."""
        ((queued_ns, marks),) = trace.executions
        assert marks is not None
        begun, sent = trace.sends
        leader = marks.leader
        span = trace.span_id
        pieces = self._pieces.copy()
        pieces[1::2] = self._ordered(
            (
                epoch + trace.first_ns,
                epoch + trace.received_ns,
                epoch + trace.began_ns,
                epoch + queued_ns,
                epoch + marks.started_ns,
                epoch + marks.inputs_ready_ns,
                epoch + marks.computed_ns,
                epoch + marks.ended_ns,
                epoch + trace.ended_ns,
                epoch + trace.answered_ns,
                epoch + begun,
                epoch + sent,
                span.to_bytes(8),
                (span + 1).to_bytes(8),
                (span + 2).to_bytes(8),
                (span + 3).to_bytes(8),
                trace.parent_span.to_bytes(8),
                trace.trace_id.to_bytes(16),
                wire.attribute(9, "triton.trace_id", trace.number),
                wire.attribute(9, "triton.request_id", trace.id) if trace.id else b"",
                b"" if leader is None else wire.link(leader.trace_id, leader.span_id),
            )
        )
        return self._pack(*pieces)


class Foundry:
    """Makes spans of traces, and keeps moulds. For one thread."""

    def __init__(self) -> None:
        self._moulds: dict[Sequence[object], Mould] = {}

    def spans_of(self, trace: SpannedTrace, epoch: int) -> bytes:
        """Return the spans of a trace; ``epoch`` as for those of any."""
        marks = _usual(trace)
        if marks is None:
            return spans_of(trace, epoch)
        sizes = (trace.number.bit_length() + 6) // 7, len(trace.id), trace.parent_span > 0, _is_led(trace, marks)
        key = (trace.header.model_name, trace.version, trace.protocol, marks.requests, *sizes)
        mould = self._moulds.get(key)
        if mould is None:
            if len(self._moulds) >= _MOST:
                self._moulds.clear()
            mould = self._moulds[key] = Mould(trace)
        return mould.cast(trace, epoch)


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
