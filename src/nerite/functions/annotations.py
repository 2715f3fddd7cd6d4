"""Annotations of tensors, such as ``Float32["n", 4]``, and how each kind of annotation crosses the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Union

from nerite.core import tensor as dtypes
from nerite.core.tensor import DataType
from nerite.core.text import MAX_NAME

Dimension = int | str


class FunctionMistake(TypeError):
    """The signature of a function cannot be served. Raised when the function is decorated; says how to mend it."""


class TensorType:
    """Annotation of an array: element type and dimensions. Without dimensions it is one number, text or bytes.

    A dimension is a size, a name for a free size (equal names must have equal sizes in one call), or -1.
    """

    __slots__ = ("datatype", "dims", "name", "text")

    def __init__(self, name: str, datatype: DataType, dims: tuple[Dimension, ...] = (), *, text: bool = False) -> None:
        self.name = name
        self.datatype = datatype
        self.dims = dims
        self.text = text
        """The elements of BYTES are UTF-8, and ``str`` in the function."""

    def __getitem__(self, dims: object) -> TensorType:
        if self.dims:
            raise FunctionMistake(f"{self!r} has dimensions already: write them in one pair of brackets")
        given = dims if isinstance(dims, tuple) else (dims,)
        for each in given:
            if isinstance(each, bool) or not isinstance(each, int | str):
                raise FunctionMistake(
                    f"{self.name}[{each!r}]: a dimension is a size, such as 3, or a name, such as 'n', for any size"
                )
            if isinstance(each, int) and each != -1 and each < 1:
                raise FunctionMistake(f"{self.name}[{each}]: a size is 1 or more, or -1 for any size")
            if isinstance(each, str) and not (each.isidentifier() and len(each) <= MAX_NAME):
                raise FunctionMistake(f"{self.name}[{each!r}]: a named dimension is an identifier, such as 'n'")
        return TensorType(self.name, self.datatype, given, text=self.text)

    def __call__(self, *_: object) -> None:
        """Say that this is an annotation and not a type to create objects of."""
        raise FunctionMistake(
            f"{self.name} is for annotations. To create an array: numpy.array(values, {self.numpy!r})"
        )

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorType):
            return NotImplemented
        return (self.name, self.dims) == (other.name, other.dims)

    def __hash__(self) -> int:
        return hash((self.name, self.dims))

    def __repr__(self) -> str:
        return f"{self.name}[{', '.join(map(repr, self.dims))}]" if self.dims else self.name

    @property
    def numpy(self) -> str:
        """Name of the numpy type of the elements."""
        return self.datatype.numpy.name

    @property
    def config_dims(self) -> tuple[int, ...]:
        """The dimensions as a configuration has them: -1 for each free one."""
        return tuple(each if isinstance(each, int) else -1 for each in self.dims)


ARRAYS: Final[Mapping[str, TensorType]] = {
    name: TensorType(name, datatype, text=name == "Text")
    for name, datatype in (
        ("Bool", dtypes.BOOL),
        ("Int8", dtypes.INT8),
        ("Int16", dtypes.INT16),
        ("Int32", dtypes.INT32),
        ("Int64", dtypes.INT64),
        ("UInt8", dtypes.UINT8),
        ("UInt16", dtypes.UINT16),
        ("UInt32", dtypes.UINT32),
        ("UInt64", dtypes.UINT64),
        ("Float16", dtypes.FP16),
        ("Float32", dtypes.FP32),
        ("Float64", dtypes.FP64),
        ("Bytes", dtypes.BYTES),
        ("Text", dtypes.BYTES),
    )
}
"""The annotations, by the names that ``nerite`` exports."""

SCALARS: Final[Mapping[object, TensorType]] = {
    bool: ARRAYS["Bool"],
    int: ARRAYS["Int64"],
    float: ARRAYS["Float64"],
    bytes: ARRAYS["Bytes"],
    str: ARRAYS["Text"],
}
"""Python's own types, for one value each."""


class SequenceState(dict[str, Any]):
    """What a function keeps between the requests of one sequence. A parameter with this annotation receives it.

    It is empty at the start of the sequence, and dropped after its end.
    """

    id: int | str = 0
    """Correlation id of the sequence."""
    start: bool = False
    """This is the first request of the sequence."""
    end: bool = False
    """This is the last request of the sequence."""
