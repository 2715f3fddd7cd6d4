"""Loads models for tests without a server, from a directory or a class, with stand-ins for the models they call."""

from __future__ import annotations

import inspect
import json
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeAlias, TypeVar

from numpy.typing import ArrayLike

from nerite.backends.interface import Backend, ExecutionTimes, Instance, InstanceContext, ModelContext
from nerite.backends.python import PythonBackend
from nerite.backends.python.backend import completed
from nerite.backends.python.instance import PythonInstance
from nerite.backends.python.module import model_traceback
from nerite.config.defaults import NO_GPUS, normalise_instances
from nerite.config.json_form import from_json, to_json
from nerite.config.loading import apply_completion, finish_config, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.signature import signature_of
from nerite.core import model_calls
from nerite.core.errors import Cancelled, Internal, NeriteError, NotFound, Unsupported
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.signature import Signature
from nerite.core.tensor import TensorData
from nerite.devices.exchange import on_host
from nerite.dispatch.interface import SelectivePicker
from nerite.instances.instance import run_model
from nerite.models.launcher import picker_for
from nerite.testing.requests import Answer, Request, SentRequest, SequencesUnderTest, answer_of, to_test, to_wire
from triton_python_backend_utils.model import closed, opened

# Stand-in for the server in tests of models that call other models: those are functions of the test.

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
        data: Sequence[TensorData],
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
        inputs = {spec.name: to_test(spec, on_host(each)) for spec, each in zip(header.inputs, data, strict=True)}
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


class OpenedModel:
    """Version 1 of a model, opened by a backend as the server would do it.

    A context manager that closes the model and its remaining instances.
    """

    def __init__(
        self, backend: Backend, directory: Path, settings: Mapping[str, str], *, elsewhere: bool = False
    ) -> None:
        """``elsewhere`` simulates that another process than the one that opens the model completes the configuration.

        Raises the ``NeriteError`` of the backend about the model or its configuration.
        """
        memo: dict[Any, Any] = {}

        def context(config: ModelConfig) -> ModelContext:
            return ModelContext(config.name, 1, directory, to_json(config), settings, memo)

        def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
            return backend.complete(context(config))

        polled = poll_model_directory(directory)
        finished = finish_config(polled, 1, complete=complete)
        for mistake in (*polled.mistakes, *finished.mistakes):
            raise mistake.as_error()
        self.config = finished.config
        self.context = context(self.config)
        if elsewhere:
            sent = json.loads(json.dumps(self.context.config))
            self.context = replace(self.context, config=sent, memo={})
        self.signature = signature_of(finished.config, directory)
        self._model = backend.open(self.context)
        self._instances: list[Instance] = []

    def instance(self) -> Instance:
        """Create an instance."""
        made = self._model.instance(InstanceContext(f"{self.context.name}_0_{len(self._instances)}"))
        self._instances.append(made)
        return made

    def close_instance(self, instance: Instance) -> None:
        """Close an instance of this model."""
        self._instances.remove(instance)
        instance.close()

    def close(self) -> None:
        """Close all instances and the model."""
        while self._instances:
            self._instances.pop().close()
        self._model.close()

    def __enter__(self) -> OpenedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def executed(instance: Instance, batch: Sequence[SentRequest]) -> list[Answer | NeriteError]:
    """Execute a batch as the server does; return one answer for each request."""
    responses = run_model(instance, "under test", batch, ExecutionTimes())
    return [
        request.only() if response is None else answer_of(response)
        for request, response in zip(batch, responses, strict=True)
    ]


P = ParamSpec("P")
R = TypeVar("R")


def own_error(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``call``; re-raise the model's own exception with only the model's frames, instead of the server's error."""
    __tracebackhide__ = True
    try:
        return call(*args, **kwargs)
    except NeriteError as error:
        refusal = error
    own = refusal.__cause__
    if own is None:
        raise refusal
    raise own.with_traceback(model_traceback(own))


class ModelUnderTest:
    """A loaded model. Created by ``load_model``; a context manager that closes it."""

    def __init__(
        self,
        config: Mapping[str, Any],
        signature: Signature,
        instance: PythonInstance,
        release: Callable[[], None],
        picker: SelectivePicker | None = None,
    ) -> None:
        """``picker`` is the instance picker of a model with sequences."""
        self.config = config
        """The complete configuration, as the server would report it."""
        self._signature = signature
        self._instance = instance
        self._sequences = None if picker is None else SequencesUnderTest(picker, self._execute)
        self.on_close = [release]
        """Callbacks for when the model has been finalized."""

    @property
    def model(self) -> Any:
        """The ``TritonPythonModel`` object."""
        return self._instance.model

    def infer(self, inputs: Mapping[str, ArrayLike], **request_fields: Any) -> Answer:
        """Send one request; ``request_fields`` are fields of ``Request``.

        Raises what the model raises, and ``NeriteError`` if the model answers with an error, if its answer is invalid,
        or if a server would have rejected the request.
        """
        __tracebackhide__ = True
        (answer,) = self.execute([Request(inputs, **request_fields)])
        if isinstance(answer, NeriteError):
            raise answer
        return answer

    def execute(self, requests: Sequence[Request | Mapping[str, ArrayLike]]) -> list[Answer | NeriteError]:
        """Send a batch; return one answer for each request, an error if the model answered with one.

        Raises as ``infer`` does if the batch fails as a whole.
        """
        __tracebackhide__ = True
        given = [one if isinstance(one, Request) else Request(one) for one in requests]
        batch = [one.sent_to(self._signature) for one in given]
        responses = self._run(batch)
        return [
            request.only() if response is None else answer_of(response)
            for request, response in zip(batch, responses, strict=True)
        ]

    def stream(self, inputs: Mapping[str, ArrayLike], **request_fields: Any) -> list[Answer | NeriteError]:
        """Send one request; wait for the last response and return all that the model sends through its sender.

        Raises as ``infer`` does if the request fails before, ``TimeoutError`` if the model stops sending.
        """
        __tracebackhide__ = True
        request = Request(inputs, **request_fields).sent_to(self._signature)
        (response,) = self._run([request])
        return request.all() if response is None else [answer_of(response)]

    def sequence(self, sequence_id: int | str = 1) -> SequenceUnderTest:
        """Return an object that sends requests of one sequence; the first request starts it."""
        return SequenceUnderTest(self, sequence_id)

    def is_ready(self) -> bool:
        """Return whether the model is ready."""
        return self._instance.is_ready()

    def close(self) -> None:
        """Finalize the model and unload its code."""
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
        """Return the responses to a batch; None for requests that are answered through their sinks."""
        __tracebackhide__ = True
        if self._sequences is None:
            return self._execute(batch)
        self._sequences.run(batch)
        return [None] * len(batch)

    def _execute(self, batch: Sequence[InferenceRequest]) -> Sequence[InferenceResponse | None]:
        __tracebackhide__ = True
        return own_error(self._instance.execute, batch, ExecutionTimes())


class SequenceUnderTest:
    """One sequence of requests. Created by ``ModelUnderTest.sequence``."""

    def __init__(self, model: ModelUnderTest, sequence_id: int | str) -> None:
        self._model = model
        self._id = sequence_id
        self._begun = False

    def infer(self, inputs: Mapping[str, ArrayLike], *, end: bool = False, **request_fields: Any) -> Answer:
        """Send the next request, as ``ModelUnderTest.infer`` does; ``end`` marks the last one."""
        __tracebackhide__ = True
        return self._model.infer(inputs, **self._place(end), **request_fields)

    def stream(
        self, inputs: Mapping[str, ArrayLike], *, end: bool = False, **request_fields: Any
    ) -> list[Answer | NeriteError]:
        """Send the next request, as ``ModelUnderTest.stream`` does; ``end`` marks the last one."""
        __tracebackhide__ = True
        return self._model.stream(inputs, **self._place(end), **request_fields)

    def _place(self, end: bool) -> dict[str, Any]:
        """Return the sequence fields of the next request; the one after the last starts the sequence again."""
        place = {"sequence_id": self._id, "sequence_start": not self._begun, "sequence_end": end}
        self._begun = not end
        return place


_BACKEND = PythonBackend()


def load_model(
    path_or_class: str | Path | type,
    config: Mapping[str, Any] | None = None,
    version: int = 1,
    calls: Mapping[str, OtherModel] | None = None,
) -> ModelUnderTest:
    """Load a model as the server does, and initialize it.

    ``path_or_class`` is the model's directory, which contains ``1/model.py``, or a class like ``TritonPythonModel``.
    ``config`` replaces config.pbtxt, in JSON form: ``{"max_batch_size": 8, "input": [...]}``. The model's own
    ``auto_complete_config`` is applied in any case. ``calls`` are the models that the model may call, by name:
    functions that take inputs and return outputs. Raises what the model raises, and ``ValueError`` with all mistakes in
    the configuration.
    """
    __tracebackhide__ = True
    stand_in = StandIn(calls or {})
    before, model_calls.current = model_calls.current, stand_in

    def leave() -> None:
        if model_calls.current is stand_in:
            model_calls.current = before

    try:
        if isinstance(path_or_class, type):
            model = _from_class(path_or_class, config or {}, version)
        else:
            model = _from_directory(Path(path_or_class).resolve(), config, version)
    except BaseException:  # restore the state for the next test, whatever happened
        leave()
        raise
    stand_in.allowed = True
    model.on_close.append(leave)
    return model


def _from_directory(directory: Path, config: Mapping[str, Any] | None, version: int) -> ModelUnderTest:
    __tracebackhide__ = True

    def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
        return own_error(_BACKEND.complete, _context(config, directory, version))

    polled = poll_model_directory(directory, override=None if config is None else json.dumps(config))
    finished = finish_config(polled, version, complete=complete)
    mistakes = dict.fromkeys((*polled.mistakes, *finished.mistakes))
    if mistakes:
        raise ValueError("\n".join(map(str, mistakes)))
    context = _context(finished.config, directory, version)
    model = own_error(_BACKEND.open, context)
    try:
        instance = own_error(model.instance, _first_instance(finished.config))
    except BaseException:
        model.close()
        raise
    return _under_test(finished.config, context, instance, model.close)


def _from_class(model_class: type, given: Mapping[str, Any], version: int) -> ModelUnderTest:
    __tracebackhide__ = True
    folder = _folder(model_class)
    name = given.get("name") or folder.name
    config = normalise_instances(from_json({"name": name, "backend": "python", **given}), NO_GPUS)
    config = apply_completion(config, own_error(completed, _context(config, folder, version), model_class))
    context = _context(config, folder, version)
    opened(folder, folder)
    try:
        instance = own_error(PythonInstance, context, model_class, _first_instance(config))
    except BaseException:
        closed(folder, folder)
        raise

    def release() -> None:
        closed(folder, folder)

    return _under_test(config, context, instance, release)


def _under_test(
    config: ModelConfig, context: ModelContext, instance: PythonInstance, release: Callable[[], None]
) -> ModelUnderTest:
    sequences = None if config.sequence_batching is None else picker_for(config, context.directory)
    return ModelUnderTest(context.config, signature_of(config, context.directory), instance, release, sequences)


def _folder(model_class: type) -> Path:
    """Return the directory of the class's file; the working directory if it has none (notebook, prompt)."""
    try:
        return Path(inspect.getfile(model_class)).resolve().parent
    except (OSError, TypeError):
        return Path.cwd()


def _context(config: ModelConfig, directory: Path, version: int) -> ModelContext:
    return ModelContext(config.name, version, directory, to_json(config))


def _first_instance(config: ModelConfig) -> InstanceContext:
    group = config.instance_group[0]
    return InstanceContext(f"{group.name}_0", group.kind.removeprefix("KIND_"), next(iter(group.gpus), 0))
