"""The way of a request's deltas to its caller: one response for each step, or one for all of them.

The engine's thread brings deltas and must not wait for a caller who reads slowly. So an answer that is paused gathers
what comes, and gives it as one response later.
"""

from __future__ import annotations

import json
import math
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Final

from nerite.backends.interface import Reporter
from nerite.core import headers, tensor
from nerite.core.byte_budget import RESPONSE_HEADERS, Memo
from nerite.core.engine_report import EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Array, Buffer, TensorSpec, from_array, join_bytes
from nerite.llm.engine import EngineStats, FinishReason, TokenDelta, TokenLogprob
from nerite.llm.request import LlmCall

# The headers of a model's responses: equal ones are the same object, and are encoded once.


class ResponseHeaders:
    """Those of one model."""

    def __init__(self, model: str, version: str, declared: Sequence[str]) -> None:
        """``declared`` are the outputs of the configuration; others are left out."""
        self._model = model
        self._version = version
        self._declared = frozenset(declared)
        self._made: Memo[tuple[TensorSpec, ...], ResponseHeader] = Memo()

    def of(self, request: InferenceRequest, outputs: Iterable[TensorSpec]) -> ResponseHeader:
        """Return the header of those of ``outputs`` that the request wants and the model declares."""
        wanted = request.header.wanted or self._declared
        form = tuple(spec for spec in outputs if spec.name in wanted and spec.name in self._declared)
        header = self._made.get(form)
        if header is None:
            header = ResponseHeader(self._model, self._version, form)
            RESPONSE_HEADERS.put(self._made, form, header, 2 * headers.response_header_bytes(header))
        return header

    def response(self, request: InferenceRequest, outputs: Mapping[str, Array]) -> InferenceResponse:
        """Return those of ``outputs`` that the request wants and the model declares."""
        tensors = {name: from_array(name, array) for name, array in outputs.items()}
        header = self.of(request, [spec for spec, _ in tensors.values()])
        return InferenceResponse(header, [tensors[spec.name][1] for spec in header.outputs])


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


class StreamedAnswer:
    """Takes what becomes of a request, and responds to it."""

    def __init__(self, request: InferenceRequest, call: LlmCall, headers: ResponseHeaders) -> None:
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

    def advanced(self, deltas: Sequence[TokenDelta]) -> None:
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

    def _gather(self, delta: TokenDelta) -> None:
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


def _outputs(call: LlmCall) -> list[TensorSpec]:
    """Return what a response to a request consists of."""
    sequences = (call.sampling.n,)
    extras = [
        TensorSpec("finish_reason", tensor.BYTES, sequences),
        TensorSpec("cumulative_logprob", tensor.FP32, sequences),
        TensorSpec("logprobs", tensor.BYTES, sequences),
        TensorSpec("num_input_tokens", tensor.UINT32, (1,)),
        TensorSpec("num_output_tokens", tensor.UINT32, sequences),
    ]
    return [TensorSpec("text_output", tensor.BYTES, sequences), *(each for each in extras if each.name in call.extras)]


# From tokens to text, a step at a time. Pure: whoever calls decodes.
#
# A token need not be a whole character, and what it looks like may depend on the one before. So text is decoded from
# a few tokens back on, and only what is new is handed out. What may be the start of a stop string waits until it is
# clear whether it is one.

_LONGEST: Final = 32
"""Tokens that are decoded again with each new one."""
_KEPT: Final = 6
"""Tokens to begin with, so that the first new one looks as it would after all that came before."""
_HALF: Final = "\ufffd"
"""What stands for a byte that is no character, or not yet."""
_HALVES: Final = 3
"""So many may become one character with the next token."""


class TextStream:
    """The text of one sequence."""

    def __init__(self, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0) -> None:
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._given = 0
        """Characters of the window's text that have been handed on."""
        self._held = ""
        """What may be the start of a stop string."""
        self.window: list[int] = []
        """The tokens to decode for ``take``."""
        self.stopped = False
        """A stop string has come; nothing is taken after it."""

    def add(self, tokens: Sequence[int]) -> None:
        """Take new tokens; their text is due with ``take``."""
        self._count += len(tokens)
        self.window.extend(tokens)

    def take(self, decoded: str, decode: Callable[[Sequence[int]], str], *, last: bool = False) -> str:
        """Return what is new and clear, given the text of ``window``. ``last``: no more tokens come."""
        clear = len(decoded) - (0 if last else _halves(decoded))
        self._held += decoded[self._given : clear]
        self._given = max(clear, self._given)
        # Not in the middle of a character, which would look otherwise without its beginning.
        if len(self.window) > _LONGEST and not _halves(decoded):
            self.window = self.window[-_KEPT:]
            again = decode(self.window)
            self._given = len(again) - _halves(again)
        return self._clear(last)

    def _clear(self, last: bool) -> str:
        if self._stop and self._count > self._min_tokens:
            found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                text, self._held = self._held[: at + len(stop) * self._include_stop], ""
                self.stopped = True
                return text
        waits = 0 if last else self._start_of_stop()
        clear = len(self._held) - waits
        text, self._held = self._held[:clear], self._held[clear:]
        return text

    def _start_of_stop(self) -> int:
        """Return how many characters at the end may be the start of a stop string."""
        held, longest = self._held, 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(held)), longest, -1):
                if held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _halves(text: str) -> int:
    """Return how many characters at the end the next token may change."""
    return min(len(text) - len(text.rstrip(_HALF)), _HALVES)


# What a step of an engine has brought, until all of it leaves together: one report, and the responses.

_ENDED: Final = {
    FinishReason.STOP: RequestEnded.STOP,
    FinishReason.LENGTH: RequestEnded.LENGTH,
    FinishReason.ABORT: RequestEnded.CANCELLED,
}


class StepReport:
    """The one that is under way. For the engine's thread alone."""

    def __init__(self, reporter: Reporter, patience: int) -> None:
        """``patience``: seconds that one may take; 0: any time."""
        self._reporter = reporter
        self._patience = patience
        self._progress: list[RequestProgress] = []
        self._responses: list[Callable[[], None]] = []

    def add(self, progress: RequestProgress, respond: Callable[[], None]) -> None:
        """Note what has become of a request, and how it is answered."""
        self._progress.append(progress)
        self._responses.append(respond)

    def over(self, stats: EngineStats) -> None:
        """Tell the server how the engine is, and answer the requests."""
        progress, self._progress = self._progress, []
        responses, self._responses = self._responses, []
        with self._reporter.together():
            self._reporter.report(
                EngineReport(
                    stats.running,
                    stats.waiting,
                    stats.total_blocks,
                    stats.free_blocks,
                    stats.block_size,
                    stats.context_length,
                    stats.most_sequences,
                    self._patience,
                    stats.failures,
                    stats.prefix_queries,
                    stats.prefix_hits,
                    stats.preemptions,
                    stats.drafted,
                    stats.accepted,
                    progress,
                )
            )
            for respond in responses:
                respond()


class RequestFollower:
    """Follows one request through an engine, as its listener."""

    def __init__(self, request: InferenceRequest, answer: StreamedAnswer, sequences: int, step: StepReport) -> None:
        self._request = request
        self._answer = answer
        self._sequences = sequences
        self._unfinished = sequences
        self._begun: RequestBegun | None = None
        """Until it is told."""
        self._step = step

    def admitted(self, prompt_tokens: int, cached_tokens: int = 0, image_tokens: int = 0) -> None:
        """Note how long the prompt is."""
        self._begun = RequestBegun(time.monotonic_ns(), prompt_tokens, cached_tokens, self._sequences, image_tokens)
        self._answer.admitted(prompt_tokens)
        self._tell(0, None, _nothing)

    def advanced(self, deltas: Sequence[TokenDelta]) -> None:
        """Have what came told of, and the request answered with it."""
        ended = None
        for delta in deltas:
            if delta.finish_reason is not None:
                self._unfinished -= 1
                ended = delta.finish_reason
        tokens = sum(len(delta.tokens) for delta in deltas)
        of_all = _ENDED[ended] if ended is not None and not self._unfinished else None
        self._tell(tokens, of_all, partial(self._answer.advanced, deltas))

    def failed(self, error: NeriteError) -> None:
        """Have it told, and the request answered with it."""
        self._tell(0, RequestEnded.FAILED, partial(self._answer.failed, error))

    def _tell(self, tokens: int, ended: RequestEnded | None, respond: Callable[[], None]) -> None:
        begun, self._begun = self._begun, None
        self._step.add(RequestProgress(self._request, tokens, begun, ended), respond)


def _nothing() -> None:
    """StreamedAnswer nothing yet."""
