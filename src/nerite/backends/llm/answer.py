"""The way of a request's deltas to its caller: one response for each step, or one for all of them.

The engine's thread brings deltas and must not wait for a caller who reads slowly. So an answer that is paused gathers
what comes, and gives it as one response later.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from nerite.backends.llm.call import Call
from nerite.backends.llm.engine import Delta, FinishReason, TokenLogprob
from nerite.core import dtype
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Array, Buffer, TensorSpec, from_array

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
        self._headers = headers
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
        sequences, extras = self._sequences, self._call.extras
        outputs: dict[str, Array] = {
            "text_output": _strings([self._call.prepend + "".join(sequence.text) for sequence in sequences])
        }
        if "finish_reason" in extras:
            # vLLM's word for a sequence that goes on is Python's None, as text.
            reasons = [sequence.finish_reason for sequence in sequences]
            outputs["finish_reason"] = _strings(["None" if reason is None else reason.value for reason in reasons])
        if "cumulative_logprob" in extras:
            told = self._call.sampling.logprobs is not None
            outputs["cumulative_logprob"] = np.array(
                self._cumulative if told else [np.nan] * len(sequences), np.float32
            )
        if "logprobs" in extras:
            outputs["logprobs"] = _strings([self._logprobs(sequence.logprobs) for sequence in sequences])
        if "num_input_tokens" in extras:
            outputs["num_input_tokens"] = np.array([self._prompt_tokens], np.uint32)
        if "num_output_tokens" in extras:
            outputs["num_output_tokens"] = np.array([sequence.tokens for sequence in sequences], np.uint32)
        return self._headers.response(self._request, outputs)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> str:
        if self._call.sampling.logprobs is None:
            return "null"
        return json.dumps([{str(one.token): _told(one) for one in (each, *each.others)} for each in logprobs])


class Headers:
    """The headers of a model's responses: equal ones are the same object, and are encoded once."""

    _MOST: Final = 1024

    def __init__(self, model: str, version: str, declared: Sequence[str]) -> None:
        """``declared`` are the outputs of the configuration; others are left out."""
        self._model = model
        self._version = version
        self._declared = frozenset(declared)
        self._made: dict[tuple[TensorSpec, ...], ResponseHeader] = {}

    def response(self, request: InferenceRequest, outputs: Mapping[str, Array]) -> InferenceResponse:
        """Return those of ``outputs`` that the request wants and the model declares."""
        wanted = request.header.wanted or self._declared
        tensors: list[tuple[TensorSpec, Buffer]] = [
            from_array(name, array) for name, array in outputs.items() if name in wanted and name in self._declared
        ]
        form = tuple(spec for spec, _ in tensors)
        header = self._made.get(form)
        if header is None:
            if len(self._made) >= self._MOST:
                self._made.clear()
            header = self._made[form] = ResponseHeader(self._model, self._version, form)
        return InferenceResponse(header, [data for _, data in tensors])


def _told(one: TokenLogprob) -> dict[str, object]:
    return {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.text}


def _strings(texts: Sequence[str]) -> Array:
    return np.array([text.encode() for text in texts], dtype.BYTES.numpy)
