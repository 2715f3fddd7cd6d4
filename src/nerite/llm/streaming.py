"""Turns the deltas of a request into responses: one per step if the caller streams, otherwise one at the end.

The engine's thread delivers deltas and must not wait for a slow reader, so a paused answer accumulates deltas and sends
them as one response later. Also here: incremental detokenization (``TextStream``) and the report of each step.
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
from nerite.core.engine_report import AdapterUse, EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Array, Buffer, TensorSpec, from_array, join_bytes
from nerite.llm.engine import EngineStats, FinishReason, TokenDelta, TokenLogprob
from nerite.llm.request import LlmCall


class ResponseHeaders:
    """Interned response headers of one model: equal headers are the same object and are encoded once."""

    def __init__(self, model: str, version: str, declared: Sequence[str]) -> None:
        """``declared`` are the outputs of the configuration; others are omitted from responses."""
        self._model = model
        self._version = version
        self._declared = frozenset(declared)
        self._made: Memo[tuple[TensorSpec, ...], ResponseHeader] = Memo()

    def of(self, request: InferenceRequest, outputs: Iterable[TensorSpec]) -> ResponseHeader:
        """Return the header for those ``outputs`` that the request wants and the model declares."""
        wanted = request.header.wanted or self._declared
        form = tuple(spec for spec in outputs if spec.name in wanted and spec.name in self._declared)
        header = self._made.get(form)
        if header is None:
            header = ResponseHeader(self._model, self._version, form)
            RESPONSE_HEADERS.put(self._made, form, header, 2 * headers.response_header_bytes(header))
        return header

    def response(self, request: InferenceRequest, outputs: Mapping[str, Array]) -> InferenceResponse:
        """Return a response with those ``outputs`` that the request wants and the model declares."""
        tensors = {name: from_array(name, array) for name, array in outputs.items()}
        header = self.of(request, [spec for spec, _ in tensors.values()])
        return InferenceResponse(header, [tensors[spec.name][1] for spec in header.outputs])


CANCELLED: Final = "Request was cancelled"
WRONG: Final = "Error generating stream: "


class _Pending:
    """Output of a sequence that was not sent yet."""

    __slots__ = ("finish_reason", "ids", "logprobs", "text", "tokens")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens = 0
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None


class StreamedAnswer:
    """Sends the responses of one request as the engine produces its output. Thread-safe."""

    def __init__(self, request: InferenceRequest, call: LlmCall, headers: ResponseHeaders) -> None:
        self._request = request
        self._call = call
        self._headers = headers
        self._header = headers.of(request, _outputs(call))
        self._keeps_ids = "token_ids" in call.extras
        self._lock = threading.RLock()
        self._paused = False
        self._over = False
        """The final response was sent."""
        self._sequences = [_Pending() for _ in range(call.sampling.n)]
        self._cumulative = [0.0] * call.sampling.n
        self._unfinished = call.sampling.n
        self._prompt_tokens = 0
        self._cached_tokens: int | None = None
        self._prompt_ids: Sequence[int] | None = None
        """The tokens of the prompt, until they were sent."""
        self._prompt_logprobs: Sequence[TokenLogprob] | None = None

    def tokenized(self, tokens: Sequence[int]) -> None:
        """Record the tokens of the prompt."""
        self._prompt_ids, self._prompt_tokens = tokens, len(tokens)

    def end(self) -> None:
        """Respond without having generated anything, because no token is wanted."""
        self.advanced([TokenDelta(index, (), "", (), FinishReason.LENGTH) for index in range(len(self._sequences))])

    def admitted(self, prompt_tokens: int) -> None:
        """Record the length of the prompt."""
        self._prompt_tokens = prompt_tokens

    def advanced(self, deltas: Sequence[TokenDelta]) -> None:
        """Accumulate the output of a step, and respond if a response is due."""
        with self._lock:
            for delta in deltas:
                self._accumulate(delta)
            self._flush()

    def failed(self, error: NeriteError) -> None:
        """Respond with the error that ended the request."""
        if isinstance(error, InvalidArgument):
            error = error.prefixed(WRONG)
        self._request.respond(InferenceResponse.failed(error))

    def paused(self, _request: InferenceRequest, paused: bool) -> None:
        """Start accumulating, or send what has accumulated. May be called from any thread."""
        with self._lock:
            self._paused = paused
            self._flush()

    def _accumulate(self, delta: TokenDelta) -> None:
        sequence = self._sequences[delta.index]
        if delta.cached_tokens is not None:
            self._cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs:
            self._prompt_logprobs = delta.prompt_logprobs
        if self._call.sampling.max_tokens == 0:  # the engine generates a token nevertheless
            if delta.finish_reason is not None:
                sequence.finish_reason = FinishReason.LENGTH
                self._unfinished -= 1
            return
        sequence.text.append(delta.text)
        sequence.tokens += len(delta.tokens)
        if self._keeps_ids:
            sequence.ids.extend(delta.tokens)
        sequence.logprobs.extend(delta.logprobs)
        self._cumulative[delta.index] += sum(each.logprob for each in delta.logprobs)
        if delta.finish_reason is not None:
            sequence.finish_reason = delta.finish_reason
            self._unfinished -= 1

    def _flush(self) -> None:
        """Send the accumulated output if a response is due."""
        final = not self._unfinished
        sequences = self._sequences
        if self._paused or self._over or not (final or self._call.stream):
            return
        self._over = final
        if any(sequence.finish_reason is FinishReason.ABORT for sequence in sequences):
            self._request.respond(InferenceResponse.failed(Cancelled(CANCELLED)))
        elif final or any(sequence.tokens for sequence in sequences):
            response = self._response()
            # Reset before sending, because sending may pause or cancel the request.
            for sequence in sequences:
                sequence.text, sequence.tokens, sequence.ids, sequence.logprobs = [], 0, [], []
            self._prompt_ids = self._prompt_logprobs = None
            self._request.respond(response, final)

    def _response(self) -> InferenceResponse:
        header = self._header
        if "output_log_probs" in self._call.extras:  # its length differs from response to response
            header = self._headers.of(self._request, _outputs(self._call, len(self._sequences[0].logprobs)))
        return InferenceResponse(header, [self._data(spec.name) for spec in header.outputs])

    def _data(self, output: str) -> Buffer:
        """Return an output as bytes. A numpy array of one element would take longer to create than a token."""
        sequences = self._sequences
        if output == "text_output":
            return join_bytes(self._call.prepend + "".join(sequence.text) for sequence in sequences)
        if output == "finish_reason":
            # vLLM writes "None" for a sequence that is not finished.
            return join_bytes(each.finish_reason.value if each.finish_reason else "None" for each in sequences)
        if output == "output_log_probs":
            scores = [each.logprob for each in sequences[0].logprobs]
            return struct.pack(f"<{len(scores)}f", *scores)
        if output in ("cumulative_logprob", "cum_log_probs"):
            known = self._call.sampling.logprobs is not None
            values = self._cumulative if known else repeat(math.nan, len(sequences))
            return struct.pack(f"<{len(sequences)}f", *values)
        if output == "logprobs":
            return join_bytes(self._logprobs(sequence.logprobs) for sequence in sequences)
        if output == "token_ids":
            return join_bytes(json.dumps(sequence.ids) for sequence in sequences)
        if output == "prompt_token_ids":
            return join_bytes([json.dumps(self._prompt_ids)])
        if output == "prompt_logprobs":
            return join_bytes([self._scores()])
        if output == "num_cached_tokens":
            return struct.pack("<i", -1 if self._cached_tokens is None else self._cached_tokens)
        if output == "num_input_tokens":
            return struct.pack("<I", self._prompt_tokens)
        return struct.pack(f"<{len(sequences)}I", *(sequence.tokens for sequence in sequences))

    def _scores(self) -> str:
        """Return the log probabilities of the prompt, whose first token has null."""
        known = self._prompt_logprobs
        return "null" if known is None else json.dumps([_position(each) for each in known])

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> str:
        if self._call.sampling.logprobs is None:
            return "null"
        return json.dumps([_position(each) for each in logprobs])


def _position(chosen: TokenLogprob) -> dict[str, object]:
    """Return the chosen token of a position and the alternatives to it, by their ids."""
    return {str(one.token): _logprob_json(one) for one in (chosen, *chosen.others)}


def _logprob_json(one: TokenLogprob) -> dict[str, object]:
    logprob = None if math.isnan(one.logprob) else one.logprob
    return {"logprob": logprob, "rank": one.rank, "decoded_token": one.text}


def _outputs(call: LlmCall, scores: int = 0) -> list[TensorSpec]:
    """Return the output tensors of a response to a request, which has so many ``scores`` of tokens."""
    sequences = (call.sampling.n,)
    extras = [
        TensorSpec("finish_reason", tensor.BYTES, sequences),
        TensorSpec("cumulative_logprob", tensor.FP32, sequences),
        TensorSpec("logprobs", tensor.BYTES, sequences),
        TensorSpec("num_input_tokens", tensor.UINT32, (1,)),
        TensorSpec("num_output_tokens", tensor.UINT32, sequences),
        TensorSpec("num_cached_tokens", tensor.INT32, (1,)),
        TensorSpec("token_ids", tensor.BYTES, sequences),
        TensorSpec("prompt_token_ids", tensor.BYTES, (1,)),
        TensorSpec("prompt_logprobs", tensor.BYTES, (1,)),
        TensorSpec("cum_log_probs", tensor.FP32, sequences),
        TensorSpec("output_log_probs", tensor.FP32, (scores,)),
    ]
    return [TensorSpec("text_output", tensor.BYTES, sequences), *(each for each in extras if each.name in call.extras)]


_LONGEST: Final = 32
"""Maximum number of tokens in the window, all of which are decoded again with each new token."""
_KEPT: Final = 6
"""Tokens of context that a shortened window keeps, so that new tokens decode as they would after the whole text."""
_REPLACEMENT: Final = "\ufffd"
"""Decoded form of a byte that is not part of a complete character (yet)."""
_MAX_INCOMPLETE: Final = 3
"""Maximum number of bytes of an incomplete UTF-8 character."""


class TextStream:
    """Incremental detokenizer of one sequence, with stop strings. Pure: the caller decodes.

    A token may be part of a character, and its text may depend on the token before. So a window that begins a few
    tokens back is decoded each time, and only new text is returned. Text that may begin a stop string is held back
    until that is certain.
    """

    def __init__(self, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0) -> None:
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._given = 0
        """Characters of the window's text that have been taken."""
        self._held = ""
        """Text that may be the start of a stop string."""
        self.window: list[int] = []
        """The tokens to decode for ``take``."""
        self.stopped = False
        """A stop string was found; the text ends there."""

    def add(self, tokens: Sequence[int]) -> None:
        """Append new tokens to the window; ``take`` returns their text."""
        self._count += len(tokens)
        self.window.extend(tokens)

    def take(self, decoded: str, decode: Callable[[Sequence[int]], str], *, last: bool = False) -> str:
        """Return the text that is new and final, given the decoded ``window``. ``last``: no more tokens follow."""
        clear = len(decoded) - (0 if last else _incomplete(decoded))
        self._held += decoded[self._given : clear]
        self._given = max(clear, self._given)
        # Never shorten the window inside a character, which would decode differently without its first bytes.
        if len(self.window) > _LONGEST and not _incomplete(decoded):
            self.window = self.window[-_KEPT:]
            again = decode(self.window)
            self._given = len(again) - _incomplete(again)
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
        """Return how many characters at the end of the held text may be the start of a stop string."""
        held, longest = self._held, 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(held)), longest, -1):
                if held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _incomplete(text: str) -> int:
    """Return how many replacement characters at the end the next token may turn into a character."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_INCOMPLETE)


_ENDED: Final = {
    FinishReason.STOP: RequestEnded.STOP,
    FinishReason.LENGTH: RequestEnded.LENGTH,
    FinishReason.ABORT: RequestEnded.CANCELLED,
}


_NO_ADAPTERS: Final = AdapterUse()


class StepReport:
    """Collects the results of a step and sends them together: one report and all responses. For the engine's thread."""

    def __init__(self, reporter: Reporter, timeout: int) -> None:
        """``timeout``: seconds that a step may take; 0 means no limit."""
        self._reporter = reporter
        self._timeout = timeout
        self._progress: list[RequestProgress] = []
        self._responses: list[Callable[[], None]] = []
        self.adapters = 0
        """Number of LoRA adapters of the engine."""
        self._adapter_uses: dict[object, tuple[str, bool]] = {}
        """Adapter of each request that chose one, and whether the engine has started it."""

    def use_adapter(self, request: object, name: str, *, started: bool = False) -> None:
        """Note that a request uses an adapter. Thread-safe."""
        self._adapter_uses[request] = (name, started)

    def forget_adapter(self, request: object) -> None:
        """Note that a request has ended, or was refused. Thread-safe."""
        self._adapter_uses.pop(request, None)

    def _adapters(self) -> AdapterUse:
        uses = list(self._adapter_uses.values())  # one step of the interpreter: other threads add requests
        running = {name for name, started in uses if started}
        waiting = {name for name, started in uses if not started} - running
        return AdapterUse(self.adapters, tuple(sorted(running)), tuple(sorted(waiting)))

    def add(self, progress: RequestProgress, respond: Callable[[], None]) -> None:
        """Record the progress of a request, and the call that responds to it."""
        self._progress.append(progress)
        self._responses.append(respond)

    def over(self, stats: EngineStats) -> None:
        """Report the state of the engine to the server, and send all responses."""
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
                    stats.max_sequences,
                    self._timeout,
                    stats.failures,
                    stats.prefix_queries,
                    stats.prefix_hits,
                    stats.preemptions,
                    stats.drafted,
                    stats.accepted,
                    progress,
                    stats.step_began_ns,
                    stats.step_ended_ns,
                    self._adapters() if self.adapters else _NO_ADAPTERS,
                )
            )
            for respond in responses:
                respond()


class RequestFollower:
    """Listener of one request: forwards its output to the answer and its progress to the step report."""

    def __init__(
        self, request: InferenceRequest, answer: StreamedAnswer, sequences: int, step: StepReport, adapter: str = ""
    ) -> None:
        """``adapter``: name of the LoRA adapter that the request chose."""
        self._adapter = adapter
        if adapter:
            step.use_adapter(request, adapter)
        self._request = request
        self._answer = answer
        self._sequences = sequences
        self._unfinished = sequences
        self._begun: RequestBegun | None = None
        """Start of the request, until it was reported."""
        self._step = step

    def admitted(self, prompt_tokens: int, cached_tokens: int = 0, image_tokens: int = 0) -> None:
        """Record the length of the prompt, and report the start of the request."""
        self._begun = RequestBegun(time.monotonic_ns(), prompt_tokens, cached_tokens, self._sequences, image_tokens)
        self._answer.admitted(prompt_tokens)
        if self._adapter:
            self._step.use_adapter(self._request, self._adapter, started=True)
        self._report(0, None, _nothing)

    def advanced(self, deltas: Sequence[TokenDelta]) -> None:
        """Report the tokens of a step, and have the answer send them."""
        ended = None
        for delta in deltas:
            if delta.finish_reason is not None:
                self._unfinished -= 1
                ended = delta.finish_reason
        tokens = sum(len(delta.tokens) for delta in deltas)
        reason = _ENDED[ended] if ended is not None and not self._unfinished else None
        self._report(tokens, reason, partial(self._answer.advanced, deltas))

    def failed(self, error: NeriteError) -> None:
        """Report the failure, and have the answer send it."""
        self._report(0, RequestEnded.FAILED, partial(self._answer.failed, error))

    def _report(self, tokens: int, ended: RequestEnded | None, respond: Callable[[], None]) -> None:
        begun, self._begun = self._begun, None
        if ended is not None and self._adapter:
            self._step.forget_adapter(self._request)
        self._step.add(RequestProgress(self._request, tokens, begun, ended), respond)


def _nothing() -> None:
    """Send no response."""
