"""The signals that tell a model which sequence it works on: inputs that the server makes, one element each."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from nerite.config.scheduling_choice import ModelSequenceBatching, SequenceControl
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.tensor import Buffer, TensorSpec, join_bytes

_FORMS: Final = {dtypes.INT32: "<i", dtypes.FP32: "<f", dtypes.BOOL: "<?"}


class Controls:
    """The control inputs of one model, from a configuration that has been validated."""

    def __init__(self, batching: ModelSequenceBatching, batching_dims: tuple[int, ...]) -> None:
        """``batching_dims``: what stands before the shape of each tensor, 1 where there is a batch dimension."""
        shape = (*batching_dims, 1)
        self.specs: list[TensorSpec] = []
        """In the order of the configuration."""
        self._makers: list[Callable[[bool, bool, bool, int | str], Buffer]] = []
        for tensor in batching.control_input:
            for control in tensor.control:
                datatype = _datatype(control)
                self.specs.append(TensorSpec(tensor.name, datatype, shape))
                self._makers.append(_maker(control, datatype))
        self.names = [spec.name for spec in self.specs]

    def data(self, start: bool, end: bool, ready: bool, sequence_id: int | str) -> list[Buffer]:
        """Return the bytes of each control input."""
        return [make(start, end, ready, sequence_id) for make in self._makers]


def _datatype(control: SequenceControl) -> DataType:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        return dtypes.BY_CONFIG_NAME[control.data_type]
    if control.int32_false_true:
        return dtypes.INT32
    return dtypes.FP32 if control.fp32_false_true else dtypes.BOOL


def _maker(control: SequenceControl, datatype: DataType) -> Callable[[bool, bool, bool, int | str], Buffer]:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        if datatype is dtypes.BYTES:
            return lambda _start, _end, _ready, id: join_bytes([id or ""])
        size = datatype.size
        return lambda _start, _end, _ready, id: _number(id, size)
    values = control.int32_false_true or control.fp32_false_true or control.bool_false_true
    false, true = (struct.pack(_FORMS[datatype], value) for value in values)
    if control.kind == "CONTROL_SEQUENCE_START":
        return lambda start, _end, _ready, _id: true if start else false
    if control.kind == "CONTROL_SEQUENCE_END":
        return lambda _start, end, _ready, _id: true if end else false
    return lambda _start, _end, ready, _id: true if ready else false


def _number(sequence_id: int | str, size: int) -> bytes:
    """Return the lowest bytes of an id; text never comes here, it is refused on its way in."""
    assert isinstance(sequence_id, int)
    return (sequence_id & ((1 << 8 * size) - 1)).to_bytes(size, "little")
