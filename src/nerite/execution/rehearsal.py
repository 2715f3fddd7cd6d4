"""How samples reach a model with sequences: with controls and states, and as often as the model wants."""

from __future__ import annotations

from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.execution.runner import Batch
from nerite.execution.sequence_dress import Said, SequenceDress
from nerite.scheduling.sequence import Sequence, SequenceRequest


class Rehearsal:
    """The sequences of one instance that is warmed up.

    A sample is a sequence of one request; rows of a batch have the correlation ids 1, 2 and so on. A request that was
    recorded with a correlation id has that: it goes on with what an earlier one began, if there was one.
    """

    def __init__(self, dress: SequenceDress, *, iterative: bool) -> None:
        self._dress = dress
        self._iterative = iterative
        self._recorded: dict[int | str, Sequence] = {}

    def begin(self, batch: Batch, said: Said) -> Batch:
        """Return the requests of a sample as the model is to see them; ``said`` are inputs that it names itself."""
        dressed: Batch = []
        for number, outer in enumerate(batch, 1):
            request = SequenceRequest(outer)
            if request.sequence_id:
                self._go_on(request)
            else:
                request.sequence, request.starts, request.ends = Sequence(number), True, not self._iterative
            self._dress.dress(request, request.sequence, start=request.starts, end=request.ends)
            if said:
                self._dress.overrule(request, said)
            dressed.append(request)
        return dressed

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse:
        """Keep the states that a response leaves; return the rest of it."""
        assert isinstance(request, SequenceRequest)
        return self._dress.settle(request, response, request.sequence)

    def again(self, request: InferenceRequest) -> None:
        """Have a request that the model wants once more carry what it left."""
        assert isinstance(request, SequenceRequest)
        request.undress()
        self._dress.dress(request, request.sequence, start=False, end=request.ends)

    def _go_on(self, request: SequenceRequest) -> None:
        known = self._recorded.pop(request.sequence_id, None)
        if known is None or request.starts:
            request.starts, known = True, Sequence(request.sequence_id)
        request.sequence = known
        if not request.ends:
            self._recorded[request.sequence_id] = known
