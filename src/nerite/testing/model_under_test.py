"""A Python model in the hands of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from numpy.typing import ArrayLike

from nerite.backends.interface import Marks
from nerite.backends.python.instance import PythonInstance
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.execution.roster import SelectiveRoster
from nerite.testing.arrays import Answer
from nerite.testing.own_error import own_error
from nerite.testing.requests import Request, SentRequest, answer_of
from nerite.testing.sequences import SequencesUnderTest


class ModelUnderTest:
    """A model that is loaded. Made by ``load_model``; a context manager that closes it."""

    def __init__(
        self,
        config: Mapping[str, Any],
        signature: Signature,
        instance: PythonInstance,
        release: Callable[[], None],
        roster: SelectiveRoster | None = None,
    ) -> None:
        """``roster`` is that of a model with sequences."""
        self.config = config
        """The complete configuration, as the server would show it."""
        self._signature = signature
        self._instance = instance
        self._sequences = None if roster is None else SequencesUnderTest(roster, self._execute)
        self.on_close = [release]
        """Called when the model is finalized."""

    @property
    def model(self) -> Any:
        """The ``TritonPythonModel`` object itself."""
        return self._instance.model

    def infer(self, inputs: Mapping[str, ArrayLike], **request_fields: Any) -> Answer:
        """Send one request; ``request_fields`` are those of ``Request``.

        Raises what the model raises, and ``NeriteError`` if the model answers with an error, if its answer is none, or
        if a server would have refused the request.
        """
        __tracebackhide__ = True
        (answer,) = self.execute([Request(inputs, **request_fields)])
        if isinstance(answer, NeriteError):
            raise answer
        return answer

    def execute(self, requests: Sequence[Request | Mapping[str, ArrayLike]]) -> list[Answer | NeriteError]:
        """Send a batch; return one answer for each request, an error where the model answered with one.

        Raises as ``infer`` does if the batch fails as a whole.
        """
        __tracebackhide__ = True
        asked = [one if isinstance(one, Request) else Request(one) for one in requests]
        batch = [one.sent_to(self._signature) for one in asked]
        responses = self._run(batch)
        return [
            request.only() if response is None else answer_of(response)
            for request, response in zip(batch, responses, strict=True)
        ]

    def stream(self, inputs: Mapping[str, ArrayLike], **request_fields: Any) -> list[Answer | NeriteError]:
        """Send one request; return all that the model sends by its response sender, once it has sent the last.

        Raises as ``infer`` does if the request fails before that, ``TimeoutError`` if the model falls silent.
        """
        __tracebackhide__ = True
        request = Request(inputs, **request_fields).sent_to(self._signature)
        (response,) = self._run([request])
        return request.all() if response is None else [answer_of(response)]

    def sequence(self, sequence_id: int | str = 1) -> SequenceUnderTest:
        """Return what sends requests of one sequence; the first begins it."""
        return SequenceUnderTest(self, sequence_id)

    def is_ready(self) -> bool:
        """Return what the model says of its readiness."""
        return self._instance.is_ready()

    def close(self) -> None:
        """Finalize the model and forget its code."""
        self._instance.close()
        for call in self.on_close:
            call()

    def __enter__(self) -> ModelUnderTest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, batch: Sequence[SentRequest]) -> Sequence[InferenceResponse | None]:
        """Return the answers to a batch; None where they are given to the request."""
        __tracebackhide__ = True
        if self._sequences is None:
            return self._execute(batch)
        self._sequences.run(batch)
        return [None] * len(batch)

    def _execute(self, batch: Sequence[InferenceRequest]) -> Sequence[InferenceResponse | None]:
        __tracebackhide__ = True
        return own_error(self._instance.execute, batch, Marks())


class SequenceUnderTest:
    """One sequence of requests. Made by ``ModelUnderTest.sequence``."""

    def __init__(self, model: ModelUnderTest, sequence_id: int | str) -> None:
        self._model = model
        self._id = sequence_id
        self._begun = False

    def infer(self, inputs: Mapping[str, ArrayLike], *, end: bool = False, **request_fields: Any) -> Answer:
        """Send the next request, as ``ModelUnderTest.infer`` does; ``end``: it is the last."""
        __tracebackhide__ = True
        return self._model.infer(inputs, **self._place(end), **request_fields)

    def stream(
        self, inputs: Mapping[str, ArrayLike], *, end: bool = False, **request_fields: Any
    ) -> list[Answer | NeriteError]:
        """Send the next request, as ``ModelUnderTest.stream`` does; ``end``: it is the last."""
        __tracebackhide__ = True
        return self._model.stream(inputs, **self._place(end), **request_fields)

    def _place(self, end: bool) -> dict[str, Any]:
        """Return what the next request says of its place; after the last one comes a first."""
        place = {"sequence_id": self._id, "sequence_start": not self._begun, "sequence_end": end}
        self._begun = not end
        return place
