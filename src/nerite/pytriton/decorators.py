"""Decorators of inference callables: they convert lists of requests to named arrays, and results back.

They work on functions, methods and objects that are called; on plain functions, coroutines and generators of both
kinds. Those that need the configuration of the model find it while the model executes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from nerite.core.tensor import Array
from nerite.pytriton.exceptions import PyTritonBadParameterError, PyTritonRuntimeError, PyTritonValidationError
from nerite.pytriton.model_config.model_config import ModelConfig, Tensor
from nerite.pytriton.proxy.types import Request

Outputs = dict[str, Array]
_BEFORE_BATCH: Final = "it needs a list of requests: put it above @batch"


@dataclass(frozen=True)
class TritonModelConfig:
    """What a callable can read of its model's configuration."""

    model_name: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    config: ModelConfig
    model_version: int = 1

    @property
    def batching(self) -> bool:
        """Whether requests have a batch dimension."""
        return self.config.batching

    @property
    def max_batch_size(self) -> int:
        """Largest number of rows of a batch."""
        return self.config.max_batch_size

    @property
    def decoupled(self) -> bool:
        """Whether the model answers with streams."""
        return self.config.decoupled


@dataclass(frozen=True)
class TritonContext:
    """What ``@triton_context`` passes on."""

    model_config: TritonModelConfig


current_context: Final[ContextVar[TritonContext | None]] = ContextVar("current_context", default=None)
"""Set while a bound callable executes."""


def get_triton_context(*_: object) -> TritonContext:
    """Return the context of the model that executes. Raises ``PyTritonValidationError`` if none does."""
    context = current_context.get()
    if context is None:
        raise PyTritonValidationError("This callable is not bound to Triton, so it has no configuration of a model.")
    return context


def get_model_config(*_: object) -> TritonModelConfig:
    """Return the configuration of the model that executes. Raises ``PyTritonValidationError`` if none does."""
    return get_triton_context().model_config


def get_inference_request_batch_size(inference_request: Mapping[str, Array]) -> int:
    """Return the number of rows of a request."""
    return len(next(iter(inference_request.values())))


def convert_output(outputs: Any, *_: object, model_config: TritonModelConfig | None = None) -> Outputs:
    """Return outputs by name; of a list, the names are those of the configuration, in its order."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if not isinstance(outputs, list | tuple):
        raise PyTritonValidationError(f"The callable returned {type(outputs)}; return a dict, or a list of arrays.")
    declared = (model_config or get_model_config()).outputs
    if len(outputs) != len(declared):
        raise PyTritonValidationError(
            f"The callable returned {len(outputs)} outputs, and {len(declared)} are declared."
        )
    return {str(each.name): array for each, array in zip(declared, outputs, strict=True)}


def mapped(result: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert what a callable returned, or each part that its generator yields."""
    if inspect.isgenerator(result):
        return (convert(part) for part in result)
    if inspect.isasyncgen(result):
        return _each(result, convert)
    if inspect.isawaitable(result):
        return _later(result, convert)
    return convert(result)


async def _each(parts: Any, convert: Callable[[Any], Any]) -> Any:
    async for part in parts:
        yield convert(part)


async def _later(result: Any, convert: Callable[[Any], Any]) -> Any:
    return convert(await result)


def _requests_of(args: Sequence[Any], name: str) -> tuple[Sequence[Any], list[Request]]:
    """Return the arguments before the requests (``self``), and the requests."""
    if not args or not isinstance(args[-1], list | tuple):
        raise PyTritonRuntimeError(f"@{name} got no list of requests: {_BEFORE_BATCH}.")
    return args[:-1], list(args[-1])


def sample(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the inputs of the first request by name, for models without a batch."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before, requests = _requests_of(args, "sample")
        result = function(*before, **dict(requests[0].items()), **kwargs)
        return mapped(result, lambda outputs: [convert_output(outputs)])

    return wrapped


def batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the inputs of all requests by name, concatenated; divide the outputs among the requests."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before, requests = _requests_of(args, "batch")
        names = list(requests[0].keys())
        if any(request.keys() != requests[0].keys() for request in requests):
            raise PyTritonValidationError(
                "Requests with different inputs cannot be one batch: add @group_by_keys above."
            )
        rows = [get_inference_request_batch_size(request) for request in requests]
        inputs = {
            name: requests[0][name] if len(requests) == 1 else np.concatenate([each[name] for each in requests])
            for name in names
        }
        return mapped(function(*before, **inputs, **kwargs), lambda outputs: _divided(convert_output(outputs), rows))

    return wrapped


def _divided(outputs: Outputs, rows: Sequence[int]) -> list[Outputs]:
    total = sum(rows)
    for name, array in outputs.items():
        if len(array) != total:
            raise ValueError(f"Output '{name}' has {len(array)} rows, and the batch has {total}.")
    ends = np.cumsum(rows)
    return [
        {name: array[end - count : end] for name, array in outputs.items()}
        for end, count in zip(ends.tolist(), rows, strict=True)
    ]


def group_by_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call the function once for the requests that have the same inputs. Results keep the order of the requests."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before, requests = _requests_of(args, "group_by_keys")
        groups: dict[tuple[str, ...], list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(tuple(sorted(request.keys())), []).append(place)
        if len(groups) == 1:
            return function(*before, requests, **kwargs)
        results: list[Any] = [None] * len(requests)
        for places in groups.values():
            found = function(*before, [requests[place] for place in places], **kwargs)
            _refuse_late(found, "group_by_keys")
            for place, result in zip(places, found, strict=True):
                results[place] = result
        return results

    return wrapped


def _refuse_late(result: Any, name: str) -> None:
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        close = getattr(result, "close", None)
        if close is not None:
            close()
        raise PyTritonRuntimeError(f"@{name} cannot divide the requests of a coroutine or a generator among calls.")


def group_by_values(*keys: str, pad_fn: Callable[[list[Outputs]], list[Outputs]] | None = None) -> Any:
    """Call the function once for the rows that have the same values of some inputs. Below ``@batch``.

    ``pad_fn`` gives the results of the calls equal shapes, so that they can be one batch again.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **inputs: Any) -> Any:
            if args and isinstance(args[-1], list | tuple):
                raise PyTritonRuntimeError("@group_by_values needs named inputs: put it below @batch.")
            groups: dict[tuple[Any, ...], list[int]] = {}
            for row in range(get_inference_request_batch_size(inputs)):
                groups.setdefault(tuple(_key(inputs[key][row]) for key in keys if key in inputs), []).append(row)
            if len(groups) == 1:
                return function(*args, **inputs)
            results = []
            for rows in groups.values():
                found = function(*args, **{name: array[rows] for name, array in inputs.items()})
                _refuse_late(found, "group_by_values")
                results.append(convert_output(found))
            if pad_fn is not None:
                results = pad_fn(results)
            order = np.argsort(np.concatenate([np.array(rows) for rows in groups.values()]), kind="stable")
            return {name: np.concatenate([each[name] for each in results])[order] for name in results[0]}

        return wrapped

    return decorate


def _key(value: Any) -> Any:
    array = np.asarray(value)
    return (array.shape, tuple(array.reshape(-1).tolist()))


class ConstantPadder:
    """Gives arrays of results equal shapes, by a constant after their ends."""

    def __init__(self, pad_value: Any = 0) -> None:
        self.pad_value = pad_value

    def __call__(self, batches: list[Outputs]) -> list[Outputs]:
        """Return the results with equal shapes but for the batch."""
        for name in batches[0]:
            arrays = [each[name] for each in batches]
            if len({array.dtype.kind for array in arrays}) > 1:
                raise PyTritonRuntimeError(f"Results for '{name}' have different types, so they cannot be one batch.")
            shape = np.max([array.shape[1:] for array in arrays], axis=0) if arrays[0].ndim > 1 else ()
            value = self.pad_value
            if arrays[0].dtype.kind == "S" and not isinstance(value, bytes):
                value = b""
            for each in batches:
                widths = [
                    (0, 0),
                    *((0, int(most) - size) for most, size in zip(shape, each[name].shape[1:], strict=True)),
                ]
                each[name] = np.pad(each[name], widths, constant_values=value)
        return batches


def fill_optionals(**defaults: Array) -> Any:
    """Give requests the inputs that they leave out. Defaults are arrays without the batch dimension."""
    for name, value in defaults.items():
        if not isinstance(value, np.ndarray | np.generic):
            raise PyTritonBadParameterError(f"The default of '{name}' is {type(value)}: make it a numpy array.")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, requests = _requests_of(args, "fill_optionals")
            config = get_model_config()
            _check_defaults(config, defaults)
            for request in requests:
                rows = get_inference_request_batch_size(request)
                for name, value in defaults.items():
                    if name not in request:
                        array = np.asarray(value)
                        request[name] = np.repeat(array[np.newaxis], rows, axis=0) if config.batching else array
            return function(*before, requests, **kwargs)

        return wrapped

    return decorate


def _check_defaults(config: TritonModelConfig, defaults: Mapping[str, Array]) -> None:
    declared = {each.name: each for each in config.inputs}
    unknown = [name for name in defaults if name not in declared]
    if unknown:
        raise PyTritonBadParameterError(f"The model has no inputs {', '.join(unknown)}, which have defaults.")
    for name, value in defaults.items():
        tensor = declared[name]
        array = np.asarray(value)
        if not tensor.optional:
            raise PyTritonBadParameterError(
                f"Input '{name}' has a default, but is not optional: Tensor(…, optional=True)."
            )
        if tensor.datatype.size and array.dtype != tensor.datatype.numpy:
            raise PyTritonBadParameterError(
                f"The default of '{name}' is {array.dtype}, and not {tensor.datatype.numpy}."
            )
        if len(array.shape) != len(tensor.shape) or any(
            wanted not in (-1, size) for size, wanted in zip(array.shape, tensor.shape, strict=True)
        ):
            raise PyTritonBadParameterError(
                f"The default of '{name}' has the shape {array.shape}, and not {tensor.shape}."
            )


def triton_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the argument ``triton_context``, which has the configuration of the model."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, triton_context=get_triton_context(), **kwargs)

    return wrapped


def pad_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Repeat the last row until the batch has the next preferred size, or the largest. Outputs lose these rows again.

    Below ``@batch``.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **inputs: Any) -> Any:
        config = get_model_config().config
        rows = get_inference_request_batch_size(inputs)
        sizes = sorted({*(config.batcher.preferred_batch_size or ()), config.max_batch_size})
        missing = next((size for size in sizes if size >= rows), rows) - rows
        if missing:
            inputs = {
                name: np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) for name, array in inputs.items()
            }

        def cut(outputs: Any) -> Outputs:
            return {name: array[:rows] for name, array in convert_output(outputs).items()}

        return mapped(function(*args, **inputs), cut)

    return wrapped


def first_value(*keys: str, squeeze_single_values: bool = True, strict: bool = True) -> Any:
    """Pass the first row of some inputs instead of all rows; of one element, the element.

    ``strict``: all rows must be equal. Below ``@batch``, or on a list of requests.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def first(name: str, array: Any) -> Any:
            if strict and any(_key(row) != _key(array[0]) for row in array[1:]):
                raise PyTritonRuntimeError(
                    f"The values of '{name}' differ within a batch: add @group_by_values('{name}') above @first_value."
                )
            value = array[0]
            return np.asarray(value).reshape(-1)[0] if squeeze_single_values and np.size(value) == 1 else value

        @functools.wraps(function)
        def wrapped(*args: Any, **inputs: Any) -> Any:
            context = current_context.get()
            if context is not None and not context.model_config.batching:
                raise PyTritonRuntimeError("@first_value is for models with a batch: ModelConfig(batching=True).")
            if args and isinstance(args[-1], list | tuple):
                *before, requests = args
                for request in requests:
                    for key in keys:
                        if key in request:
                            request[key] = first(key, request[key])
                return function(*before, requests, **inputs)
            for key in keys:
                if key in inputs:
                    inputs[key] = first(key, inputs[key])
            return function(*args, **inputs)

        return wrapped

    return decorate
