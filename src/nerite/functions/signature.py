"""Reads the signature of a function: which parameters are inputs, and which outputs it returns. Pure.

Everything that cannot be served is refused here, when the function is decorated, with the remedy.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nerite.core import tensor as dtypes
from nerite.functions.annotations import SCALARS, FunctionMistake, SequenceState, TensorType

_WANTED: Final = (
    "Annotate it with an array such as nerite.Float32['n'], with float, int, bool, str, bytes, PIL.Image.Image, a list "
    "of these, or a dataclass of them"
)
_STREAMS: Final = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


class ValueForm(enum.Enum):
    """What a function sees of a tensor."""

    ARRAY = "array"
    VALUE = "value"
    """One Python object; of a batch, a list of them."""
    VALUES = "list"
    """A list of Python objects; of a batch, a list of lists."""
    IMAGE = "image"
    """An image of PIL, which is a file in a format such as PNG on the wire; of a batch, a list of images."""


class FunctionTensor(NamedTuple):
    """One input or output of a function."""

    name: str
    type: TensorType
    form: ValueForm
    optional: bool = False
    default: Any = None


class FunctionRecord(NamedTuple):
    """A dataclass whose fields are inputs, or outputs."""

    parameter: str
    """Name of the parameter; empty for outputs."""
    record: type
    fields: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FunctionSignature:
    """Inputs and outputs of a function, and how it is called."""

    inputs: tuple[FunctionTensor, ...]
    outputs: tuple[FunctionTensor, ...]
    parameters: tuple[str, ...]
    """Names of the parameters that have inputs, in order."""
    records: Mapping[str, FunctionRecord]
    """By parameter, those that are dataclasses."""
    answer: FunctionRecord | None
    """The dataclass that it returns, if it returns one."""
    state: str
    """Name of the parameter that receives the state of the sequence; empty if there is none."""
    stream: bool
    asynchronous: bool
    batch: int


def read_signature(function: Callable[..., Any], name: str, *, batch: int, given: int) -> FunctionSignature:
    """Return the signature of a function. ``given``: its first parameters that are not inputs (self, setup).

    Raises ``FunctionMistake``.
    """
    hints = _hints(function, name)
    reader = _Reader(name, batch > 0)
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < given:
        raise FunctionMistake(f"{name}() needs a first parameter, which receives what setup returned")
    inputs: list[FunctionTensor] = []
    records: dict[str, FunctionRecord] = {}
    order: list[str] = []
    state = ""
    for parameter in parameters[given:]:
        where = f"parameter '{parameter.name}' of {name}()"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise FunctionMistake(f"{where}: name each input; *args, **kwargs and positional-only are not possible")
        if parameter.name not in hints:
            raise FunctionMistake(f"{where} has no annotation. {_WANTED}")
        hint = hints[parameter.name]
        if hint is SequenceState:
            if state:
                raise FunctionMistake(f"{where}: '{state}' receives the state of the sequence already")
            state = parameter.name
            continue
        order.append(parameter.name)
        record = _record_of(hint)
        if record is not None:
            fields = reader.fields(record, where)
            records[parameter.name] = FunctionRecord(parameter.name, record, tuple(each.name for each in fields))
            inputs += fields
            continue
        optional = parameter.default is not parameter.empty
        inputs.append(reader.tensor(hint, parameter.name, where, optional, parameter.default if optional else None))
    _check_names(inputs, f"inputs of {name}()")
    if not inputs:
        raise FunctionMistake(f"{name}() has no inputs: give it a parameter, as in def {name}(x: nerite.Float32['n'])")
    if "return" not in hints or hints["return"] is type(None):
        raise FunctionMistake(
            f"{name}() does not say what it returns: add -> nerite.Float32['n'] or the like. {_WANTED}"
        )
    generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    outputs, answer = _outputs(reader, hints["return"], name, generator=generator)
    if generator and batch:
        raise FunctionMistake(
            f"{name}() is a generator, and answers one request with a stream: leave out batch={batch}, or return"
        )
    return FunctionSignature(
        tuple(inputs),
        tuple(outputs),
        tuple(order),
        records,
        answer,
        state,
        generator,
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function),
        batch,
    )


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except FunctionMistake:
        raise
    except Exception as error:  # the annotations are expressions of the program
        raise FunctionMistake(
            f"the annotations of {name}() cannot be read: {type(error).__name__}: {error}. Import or define what they "
            "name at the top of the module"
        ) from error


def _outputs(
    reader: _Reader, hint: Any, name: str, *, generator: bool
) -> tuple[list[FunctionTensor], FunctionRecord | None]:
    where = f"what {name}() returns"
    if generator:
        if typing.get_origin(hint) not in _STREAMS:
            raise FunctionMistake(f"{name}() is a generator: annotate it with Iterator[…] of what it yields")
        hint = typing.get_args(hint)[0]
        where = f"what {name}() yields"
    record = _record_of(hint)
    if record is not None:
        fields = reader.fields(record, where)
        _check_names(fields, f"outputs of {name}()")
        return fields, FunctionRecord("", record, tuple(each.name for each in fields))
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if Ellipsis in parts or not parts:
            raise FunctionMistake(f"{where}: write each part of the tuple, or return a dataclass to name the outputs")
        return [reader.tensor(each, f"output_{index}", where) for index, each in enumerate(parts)], None
    return [reader.tensor(hint, "output", where)], None


def _record_of(hint: Any) -> type | None:
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _check_names(tensors: Sequence[FunctionTensor], of: str) -> None:
    seen: set[str] = set()
    for each in tensors:
        if each.name in seen:
            raise FunctionMistake(f"two {of} have the name '{each.name}': rename one")
        seen.add(each.name)


class _Reader:
    """Reads annotations of values."""

    def __init__(self, function: str, batched: bool) -> None:
        self._function = function
        self._batched = batched

    def fields(self, record: type, where: str) -> list[FunctionTensor]:
        """Return a tensor for each field of a dataclass."""
        try:
            hints = typing.get_type_hints(record)
        except Exception as error:  # the annotations are expressions of the program
            raise FunctionMistake(f"{where}: the annotations of {record.__name__} cannot be read: {error}") from error
        found = []
        for field in dataclasses.fields(record):
            if field.init:
                here = f"field '{field.name}' of {record.__name__} ({where})"
                optional = field.default is not dataclasses.MISSING
                default = field.default if optional else None
                found.append(self.tensor(hints[field.name], field.name, here, optional, default))
        if not found:
            raise FunctionMistake(f"{where}: {record.__name__} has no fields")
        return found

    def tensor(self, hint: Any, name: str, where: str, optional: bool = False, default: Any = None) -> FunctionTensor:
        """Return the tensor that an annotation describes. Raises ``FunctionMistake``."""
        if (given := _without_none(hint)) is not None:
            if not optional:
                raise FunctionMistake(
                    f"{where} may be None: give it the default None, so that requests may leave it out"
                )
            hint = given
        if isinstance(hint, TensorType):
            return FunctionTensor(name, hint, ValueForm.ARRAY, optional, default)
        if self._batched:
            inner = _element_of(hint)
            if inner is None:
                raise self._unbatched(hint, where)
            hint = inner
        if hint in SCALARS:
            return FunctionTensor(name, SCALARS[hint], ValueForm.VALUE, optional, default)
        if _is_image(hint):
            return FunctionTensor(name, TensorType("Image", dtypes.BYTES), ValueForm.IMAGE, optional, default)
        element = _element_of(hint)
        if element in SCALARS:
            type_of = SCALARS[element]
            vector = TensorType(type_of.name, type_of.datatype, (-1,), text=type_of.text)
            return FunctionTensor(name, vector, ValueForm.VALUES, optional, default)
        raise FunctionMistake(f"{where} has the annotation {_text(hint)}, which cannot be sent. {_WANTED}")

    def _unbatched(self, hint: Any, where: str) -> FunctionMistake:
        if hint in SCALARS or _is_image(hint):
            array = "" if hint not in SCALARS else f" (or nerite.{SCALARS[hint].name}, for an array)"
            return FunctionMistake(
                f"{where} has the annotation {_text(hint)}, but {self._function}() gets a batch: annotate it with "
                f"list[{_text(hint)}]{array}, or leave out batch="
            )
        return FunctionMistake(f"{where} has the annotation {_text(hint)}, which cannot be sent. {_WANTED}")


def _without_none(hint: Any) -> Any:
    """Return the other part of an annotation ``… | None``; None for others."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(parts) == 1:
            return parts[0]
    return None


def _element_of(hint: Any) -> Any:
    """Return the annotation of the elements of a list or sequence; None for others."""
    if typing.get_origin(hint) in (list, collections.abc.Sequence):
        return typing.get_args(hint)[0]
    return None


def _is_image(hint: Any) -> bool:
    return isinstance(hint, type) and hint.__name__ == "Image" and hint.__module__ == "PIL.Image"


def _text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_origin(hint) else str(hint)


def free_dimensions(tensors: Sequence[FunctionTensor]) -> Iterator[tuple[FunctionTensor, int, str]]:
    """Yield each named dimension: its tensor, its index without the batch, and its name."""
    for each in tensors:
        for index, dimension in enumerate(each.type.dims):
            if isinstance(dimension, str):
                yield each, index, dimension
