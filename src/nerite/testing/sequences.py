"""Requests of sequences in a test: batched, dressed and run as often as the model wants, by the server's own roster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, cast

from nerite.core.errors import Internal, Unavailable
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.execution.roster import SelectiveRoster
from nerite.execution.runner import Batch, Runner
from nerite.scheduling.sequence import SequenceRequest

Execute: TypeAlias = Callable[[Sequence[InferenceRequest]], Sequence[InferenceResponse | None]]

_LATER: Final = 1 << 62
"""Nanoseconds after which no batch waits for more."""


class SequencesUnderTest:
    """The sequences of a model with one instance, which waits for nothing."""

    def __init__(self, roster: SelectiveRoster, execute: Execute) -> None:
        self._roster = roster
        self._execute = execute
        roster.came(cast(Runner, self))  # an instance is whatever the owner of a roster calls so

    def run(self, requests: Sequence[InferenceRequest]) -> None:
        """Have the model work until it has nothing more to do; answers go where ``requests`` say.

        Raises what the model raises.
        """
        __tracebackhide__ = True
        waiting = [_Streaming(request, self._roster) for request in requests]
        try:
            for request in waiting:
                refusal = self._roster.offer(request, time.monotonic_ns())
                if refusal is not None:
                    request.outer.respond(InferenceResponse.failed(refusal))
            while (chosen := self._roster.choose(time.monotonic_ns() + _LATER)) is not None:
                runner, batch = chosen
                self._run(runner, batch)
        finally:
            self._give_up(waiting)

    def _run(self, runner: Runner, batch: Batch) -> None:
        __tracebackhide__ = True
        batch = [request if isinstance(request, SequenceRequest) else _streaming_null(request) for request in batch]
        failed = InferenceResponse.failed(Internal("the model raised an exception"))
        responses: Sequence[InferenceResponse | None] = [failed] * len(batch)
        try:
            responses = self._execute(batch)
        finally:
            answered, answers, _ = self._roster.ended(runner, batch, responses, 0)
        for request, answer in zip(answered, answers, strict=True):
            if answer is not None:
                assert isinstance(request, SequenceRequest)
                request.outer.respond(answer)

    def _give_up(self, requests: Sequence[_Streaming]) -> None:
        """Refuse what still waits: nothing will change that before the test goes on."""
        for request in requests:
            if self._roster.withdraw(request):
                full = Unavailable(
                    f"sequence {request.sequence_id} waits for a slot: an instance works on so many sequences at a "
                    "time as max_batch_size or max_candidate_sequences says, and others have not ended"
                )
                request.outer.respond(InferenceResponse.failed(full))


class _Streaming(SequenceRequest):
    """A request whose model may use the response sender, and leave states with it."""

    __slots__ = ("_roster",)

    streams = True

    def __init__(self, outer: InferenceRequest, roster: SelectiveRoster) -> None:
        super().__init__(outer)
        self._roster = roster

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Answer the test, with what is not for the next request of the sequence."""
        rest = self._roster.settle(self, response)
        if rest is not None and (final or not rest.empty):
            super().respond(rest, final)


class _Null(InferenceRequest):
    """What stands in a batch for a slot without a request."""

    __slots__ = ()

    streams = True


def _streaming_null(null: InferenceRequest) -> _Null:
    return _Null(null.header, null.data, null.sink, null.arrived_ns)
