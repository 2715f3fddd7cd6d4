"""Stand-in for the server in tests of models that call other models: those are functions of the test."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from numpy.typing import ArrayLike

from nerite.core.errors import Cancelled, Internal, NeriteError, NotFound, Unsupported
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer
from nerite.testing.requests import Answer, to_test, to_wire

Outputs: TypeAlias = Mapping[str, ArrayLike] | NeriteError
OtherModel: TypeAlias = Callable[[Answer], Outputs | Iterable[Outputs]]
"""Takes inputs by name and returns outputs by name or an error; for a decoupled model, any number of them."""


class StandIn:
    """Replaces ``model_calls.current`` while a model is under test."""

    def __init__(self, models: Mapping[str, OtherModel]) -> None:
        self.allowed = False
        """True once the model is initialized and may call others."""
        self._models = models
        self._loaded = set(models)

    def call(
        self,
        header: RequestHeader,
        data: Sequence[Buffer],
        name: str,
        parent: InferenceRequest | None,
        *,
        decoupled: bool,
    ) -> _AnsweredCall:
        """Answer a call with the function for that model. Exceptions of the function are raised by ``exec``."""
        if not self.allowed:
            raise Unsupported("BLS is only supported during the 'execute' function.")
        model = header.model_name
        if model not in self._loaded:
            return _AnsweredCall([InferenceResponse.failed(_not_ready(model))])
        inputs = {spec.name: to_test(spec, each) for spec, each in zip(header.inputs, data, strict=True)}
        answer = self._models[model](inputs)
        if isinstance(answer, Mapping | NeriteError):
            return _AnsweredCall([_response(header, answer)])
        if not decoupled:
            return _AnsweredCall([InferenceResponse.failed(_several(model))])
        return _AnsweredCall([*(_response(header, each) for each in answer), EMPTY])

    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Make a model ready again. Raises ``Internal`` if the test has no function for it."""
        if model not in self._models:
            raise Internal(f"failed to load '{model}', failed to poll from model repository")
        self._loaded.add(model)

    def unload(self, model: str, *, dependents: bool) -> None:
        """Make a model unavailable."""
        self._loaded.discard(model)

    def is_ready(self, model: str, version: str) -> bool:
        """Return whether the test has a function for a model that is not unloaded."""
        return model in self._loaded


class _AnsweredCall:
    """A call whose responses are all known in advance."""

    def __init__(self, answers: Sequence[InferenceResponse]) -> None:
        self.final = False
        self._answers = deque(answers)

    def next(self) -> tuple[InferenceResponse, bool]:
        answer = self._answers.popleft()
        self.final = not self._answers
        return answer, self.final

    def when_next(self, loop: AbstractEventLoop, call: Callable[[], None]) -> None:
        loop.call_soon(call)

    def cancel(self) -> None:
        self._answers = deque([InferenceResponse.failed(Cancelled("the call was cancelled"))])

    def give_up(self) -> None:
        self._answers.clear()


def _response(header: RequestHeader, outputs: Outputs) -> InferenceResponse:
    if isinstance(outputs, NeriteError):
        return InferenceResponse.failed(outputs)
    tensors = [
        to_wire(name, value, None) for name, value in outputs.items() if not header.wanted or name in header.wanted
    ]
    specs, data = [spec for spec, _ in tensors], [each for _, each in tensors]
    return InferenceResponse(ResponseHeader(header.model_name, header.model_version or "1", specs), data)


def _not_ready(model: str) -> NeriteError:
    return NotFound(
        f"Model {model} - Error when running inference: Failed for execute the inference request. "
        f"Model '{model}' is not ready.\n    Provide a function for it: load_model(…, calls={{'{model}': function}})."
    )


def _several(model: str) -> NeriteError:
    return Unsupported(f"Model {model} is decoupled. Use 'decoupled=True' to call it.")
