"""The way of a request's deltas to its caller: one response for each step, or one for all of them.

The engine's thread brings deltas and must not wait for a caller who reads slowly. So an answer that is paused gathers
what comes, and gives it as one response later.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Sequence
from itertools import repeat
from typing import Final

from nerite.backends.llm.call import Call
from nerite.backends.llm.engine import Delta, FinishReason, TokenLogprob
from nerite.backends.llm.headers import Headers
from nerite.core import dtype
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec, join_bytes

CANCELLED: Final = "Request was cancelled"
WRONG: Final = "Error generating stream: "


class _Gathered:
    """What has come of a sequence and was not handed on."""

    __slots__ = ("finish_reason", "logprobs", "text", "tokens")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens = 0
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None


class Answer:
    """Takes what becomes of a request, and responds to it."""

    def __init__(self, request: InferenceRequest, call: Call, headers: Headers) -> None:
        self._request = request
        self._call = call
        self._header = headers.of(request, _outputs(call))
        self._lock = threading.RLock()
        self._paused = False
        self._over = False
        """The last response was given."""
        self._sequences = [_Gathered() for _ in range(call.sampling.n)]
        self._cumulative = [0.0] * call.sampling.n
        self._unfinished = call.sampling.n
        self._prompt_tokens = 0

    def admitted(self, prompt_tokens: int) -> None:
        """Note how long the prompt is."""
        self._prompt_tokens = prompt_tokens

    def advanced(self, deltas: Sequence[Delta]) -> None:
        """Gather what a step has brought, and respond if it is time."""
        with self._lock:
            for delta in deltas:
                self._gather(delta)
            self._hand_on()

    def failed(self, error: NeriteError) -> None:
        """Respond with the reason why nothing more comes."""
        if isinstance(error, InvalidArgument):
            error = error.prefixed(WRONG)
        self._request.respond(InferenceResponse.failed(error))

    def paused(self, _request: InferenceRequest, paused: bool) -> None:
        """Gather from now on; or hand on what was gathered. On any thread."""
        with self._lock:
            self._paused = paused
            self._hand_on()

    def _gather(self, delta: Delta) -> None:
        sequence = self._sequences[delta.index]
        sequence.text.append(delta.text)
        sequence.tokens += len(delta.tokens)
        sequence.logprobs.extend(delta.logprobs)
        self._cumulative[delta.index] += sum(each.logprob for each in delta.logprobs)
        if delta.finish_reason is not None:
            sequence.finish_reason = delta.finish_reason
            self._unfinished -= 1

    def _hand_on(self) -> None:
        """Respond with what was gathered, if it is time."""
        final = not self._unfinished
        sequences = self._sequences
        if self._paused or self._over or not (final or self._call.stream):
            return
        self._over = final
        if any(sequence.finish_reason is FinishReason.ABORT for sequence in sequences):
            self._request.respond(InferenceResponse.failed(Cancelled(CANCELLED)))
        elif final or any(sequence.tokens for sequence in sequences):
            response = self._response()
            # Before it is sent: with that comes the news whether more are wanted.
            for sequence in sequences:
                sequence.text, sequence.tokens, sequence.logprobs = [], 0, []
            self._request.respond(response, final)

    def _response(self) -> InferenceResponse:
        return InferenceResponse(self._header, [self._data(spec.name) for spec in self._header.outputs])

    def _data(self, output: str) -> Buffer:
        """Return one of the outputs. As bytes at once: an array of one element takes longer to make than a token."""
        sequences = self._sequences
        if output == "text_output":
            return join_bytes(self._call.prepend + "".join(sequence.text) for sequence in sequences)
        if output == "finish_reason":
            # vLLM's word for a sequence that goes on is Python's None, as text.
            return join_bytes(each.finish_reason.value if each.finish_reason else "None" for each in sequences)
        if output == "cumulative_logprob":
            told = self._call.sampling.logprobs is not None
            return struct.pack(f"<{len(sequences)}f", *(self._cumulative if told else repeat(math.nan, len(sequences))))
        if output == "logprobs":
            return join_bytes(self._logprobs(sequence.logprobs) for sequence in sequences)
        if output == "num_input_tokens":
            return struct.pack("<I", self._prompt_tokens)
        return struct.pack(f"<{len(sequences)}I", *(sequence.tokens for sequence in sequences))

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> str:
        if self._call.sampling.logprobs is None:
            return "null"
        return json.dumps([{str(one.token): _told(one) for one in (each, *each.others)} for each in logprobs])


def _told(one: TokenLogprob) -> dict[str, object]:
    return {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.text}


def _outputs(call: Call) -> list[TensorSpec]:
    """Return what a response to a request consists of."""
    sequences = (call.sampling.n,)
    extras = [
        TensorSpec("finish_reason", dtype.BYTES, sequences),
        TensorSpec("cumulative_logprob", dtype.FP32, sequences),
        TensorSpec("logprobs", dtype.BYTES, sequences),
        TensorSpec("num_input_tokens", dtype.UINT32, (1,)),
        TensorSpec("num_output_tokens", dtype.UINT32, sequences),
    ]
    return [TensorSpec("text_output", dtype.BYTES, sequences), *(each for each in extras if each.name in call.extras)]
