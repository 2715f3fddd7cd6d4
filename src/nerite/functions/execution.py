"""Runs a function as a model of the Python backend: requests to arguments, results and exceptions to responses."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

import triton_python_backend_utils as pb
from nerite.backends.python.module import CAUSES, describe_failure
from nerite.core.tensor import Array
from nerite.functions.annotations import SequenceState
from nerite.functions.model_function import ModelFunction
from nerite.functions.values import BadRequest, WrongResult, arguments_of, check_dimensions, results_of

_log = logging.getLogger("nerite.python")
_FINAL: Final = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
Group: TypeAlias = list[tuple[int, pb.InferenceRequest, dict[str, Array]]]
"""Requests of one call, each with its place in the batch and its inputs."""


class FunctionStates:
    """States of the sequences of an instance. Those that have been idle longest are dropped beyond a bound."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._states: OrderedDict[int | str, SequenceState] = OrderedDict()

    def take(self, sequence: int | str, *, start: bool, end: bool) -> SequenceState:
        """Return the state of a sequence for its next request."""
        state = self._states.pop(sequence, None)
        if state is None or start:
            state = SequenceState()
        state.id, state.start, state.end = sequence, start, end
        if not end:
            self._states[sequence] = state
            if len(self._states) > self._most:
                self._states.popitem(last=False)
        return state

    def __len__(self) -> int:
        return len(self._states)


class BackgroundLoop:
    """An event loop in a thread, for async functions, and how many calls may be in progress on it."""

    def __init__(self, name: str, most: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._room = threading.BoundedSemaphore(most)
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a call, once fewer than the most are in progress."""
        self._room.acquire()
        self._loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()

    def close(self) -> None:
        """Cancel what is in progress, and end the thread."""

        async def end() -> None:
            for task in self._tasks.copy():
                task.cancel()
            await asyncio.gather(*self._tasks.copy(), return_exceptions=True)
            await self._loop.shutdown_asyncgens()

        with suppress(asyncio.CancelledError):
            asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class FunctionModel:
    """A model whose ``execute`` calls a function. Subclasses name the function."""

    function: ClassVar[ModelFunction[..., Any]]

    def initialize(self, args: dict[str, str]) -> None:
        """Create the callable of this instance: the object of the class, or what ``setup`` prepares."""
        function = self.function
        self._name = args["model_instance_name"]
        self._signature = function.signature
        self._batched = function.signature.batch > 0
        self._call: Callable[..., Any] = function.open()
        self._states = FunctionStates(function.sequences)
        self._loop = BackgroundLoop(self._name, function.concurrency) if self._signature.asynchronous else None

    def finalize(self) -> None:
        """End what is in progress; call ``close`` of the class, if it has one."""
        if self._loop is not None:
            self._loop.close()
        close = getattr(self._call, "close", None)
        if callable(close):
            close()

    def execute(self, requests: list[pb.InferenceRequest]) -> list[pb.InferenceResponse | None] | None:
        """Answer a batch of requests."""
        answers: list[pb.InferenceResponse | None] = [None] * len(requests)
        for group in self._groups(requests, answers):
            if self._loop is not None:
                # Before ``execute`` returns, so that it is known that they answer.
                senders = [request.get_response_sender() for _, request, _ in group]
                self._loop.start(self._answer_later(group, senders))
            elif self._signature.stream:
                self._stream(*group[0][1:])
            else:
                for (place, _, _), answer in zip(group, self._answer(group), strict=True):
                    answers[place] = answer
        if self._signature.stream:
            for request, refusal in zip(requests, answers, strict=True):
                if refusal is not None:
                    request.get_response_sender().send(refusal, flags=_FINAL)
            return None
        return answers

    def _groups(
        self, requests: Sequence[pb.InferenceRequest], answers: list[pb.InferenceResponse | None]
    ) -> Iterator[Group]:
        """Yield the requests that one call answers: alone, or with the same inputs and shapes but for the batch."""
        groups: dict[object, Group] = {}
        for place, request in enumerate(requests):
            arrays = {each.name(): each.as_numpy() for each in request.inputs()}
            try:
                check_dimensions(self._signature, arrays, batched=self._batched)
            except BadRequest as error:
                answers[place] = _refused(error)
                continue
            key = tuple(sorted((name, array.shape[1:]) for name, array in arrays.items())) if self._batched else place
            groups.setdefault(key, []).append((place, request, arrays))
        yield from groups.values()

    def _answer(self, group: Group) -> list[pb.InferenceResponse]:
        try:
            arguments, rows, sizes = self._arguments(group)
            return self._responses(group, self._call(**arguments), rows, sizes)
        except CAUSES as error:
            return [self._failed(error)] * len(group)

    async def _answer_later(self, group: Group, senders: Sequence[pb.InferenceResponseSender]) -> None:
        """Answer through the senders of the requests, while the instance goes on."""
        try:
            arguments, rows, sizes = self._arguments(group)
            if self._signature.stream:
                await self._send_all(group[0][1], senders[0], self._call(**arguments), sizes)
                return
            answers = self._responses(group, await self._call(**arguments), rows, sizes)
        except CAUSES as error:
            answers = [self._failed(error)] * len(group)
        for sender, answer in zip(senders, answers, strict=True):
            with suppress(pb.TritonModelException):  # the request has ended
                sender.send(answer, flags=_FINAL)

    def _arguments(self, group: Group) -> tuple[dict[str, Any], list[int] | None, dict[str, int]]:
        """Return the arguments of a call, the rows of each request, and the sizes of named dimensions."""
        signature = self._signature
        arrays = group[0][2]
        rows = None
        if self._batched:
            rows = [len(next(iter(each.values()))) for _, _, each in group]
            if len(group) > 1:
                arrays = {name: np.concatenate([each[name] for _, _, each in group]) for name in arrays}
        sizes = check_dimensions(signature, arrays, batched=self._batched)
        state: Any = None
        if signature.state:
            states = [self._state(request) for _, request, _ in group]
            state = states[0]
            if rows is not None:
                state = [each for each, count in zip(states, rows, strict=True) for _ in range(count)]
        return arguments_of(signature, arrays, state, batched=self._batched), rows, sizes

    def _state(self, request: pb.InferenceRequest) -> SequenceState:
        flags = request.flags()
        return self._states.take(
            request.correlation_id(),
            start=bool(flags & pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            end=bool(flags & pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        )

    def _responses(
        self, group: Group, returned: Any, rows: list[int] | None, sizes: dict[str, int]
    ) -> list[pb.InferenceResponse]:
        if rows is None:
            return [_response(results_of(self._signature, returned, sizes, None))]
        arrays = results_of(self._signature, returned, sizes, sum(rows))
        answers = []
        start = 0
        for count in rows:
            answers.append(_response({name: array[start : start + count] for name, array in arrays.items()}))
            start += count
        return answers

    def _stream(self, request: pb.InferenceRequest, arrays: dict[str, Array]) -> None:
        """Send what a generator yields, until it ends or its client is gone."""
        sender = request.get_response_sender()
        try:
            arguments, _, sizes = self._arguments([(0, request, arrays)])
            generator = self._call(**arguments)
            try:
                for part in generator:
                    if request.is_cancelled():
                        break
                    sender.send(_response(results_of(self._signature, part, sizes, None)))
            finally:
                generator.close()
        except CAUSES as error:
            _end(sender, self._failed(error))
        else:
            _end(sender)

    async def _send_all(
        self,
        request: pb.InferenceRequest,
        sender: pb.InferenceResponseSender,
        parts: AsyncIterator[Any],
        sizes: dict[str, int],
    ) -> None:
        """Send what an async generator yields. A receiver that is slow is waited for in another thread."""
        try:
            async for part in parts:
                if request.is_cancelled():
                    break
                await asyncio.to_thread(sender.send, _response(results_of(self._signature, part, sizes, None)))
        except CAUSES as error:
            _end(sender, self._failed(error))
        else:
            _end(sender)
        finally:
            close = getattr(parts, "aclose", None)
            if close is not None:
                await close()

    def _failed(self, error: BaseException) -> pb.InferenceResponse:
        if isinstance(error, BadRequest):
            return _refused(error)
        reason = f"{self.function.name}(): {error}" if isinstance(error, WrongResult) else describe_failure(error)
        text = f"Failed to process the request(s) for model '{self._name}', message: {reason}"
        _log.error("%s", text)
        return pb.InferenceResponse([], pb.TritonError(text))


def _response(arrays: dict[str, Array]) -> pb.InferenceResponse:
    return pb.InferenceResponse([pb.Tensor(name, array) for name, array in arrays.items()])


def _refused(error: BadRequest) -> pb.InferenceResponse:
    return pb.InferenceResponse([], pb.TritonError(str(error), pb.TritonError.INVALID_ARG))


def _end(sender: pb.InferenceResponseSender, last: pb.InferenceResponse | None = None) -> None:
    with suppress(pb.TritonModelException):  # the request has ended
        sender.send(last, flags=_FINAL)


def model_class_of(function: ModelFunction[..., Any]) -> type[FunctionModel]:
    """Return the class that the Python backend creates instances of."""
    return type("TritonPythonModel", (FunctionModel,), {"function": function, "__module__": __name__})
