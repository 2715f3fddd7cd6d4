"""What a model takes and gives, as typed data: inputs, outputs and the helper tensors of ragged batches.

See ``model_config.py`` for the conventions that all of these classes follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from nerite.config.field_types import DataTypeName, Int64

InputFormat = Annotated[Literal["FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"], "ModelInput.Format"]
BatchInputKind = Annotated[
    Literal[
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
        "BATCH_ITEM_SHAPE",
        "BATCH_ITEM_SHAPE_FLATTEN",
    ],
    "BatchInput.Kind",
]
BatchOutputKind = Annotated[Literal["BATCH_SCATTER_WITH_INPUT_SHAPE"], "BatchOutput.Kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensorReshape:
    """The shape that the framework sees instead of ``dims``. Empty: a scalar an element of the batch."""

    shape: tuple[Int64, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """An input. ``dims`` is without the batch dimension; -1 is any size."""

    name: str = ""
    data_type: DataTypeName = "TYPE_INVALID"
    format: InputFormat = "FORMAT_NONE"
    dims: tuple[Int64, ...] = ()
    reshape: ModelTensorReshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output. ``dims`` is without the batch dimension; -1 is any size."""

    name: str = ""
    data_type: DataTypeName = "TYPE_INVALID"
    dims: tuple[Int64, ...] = ()
    reshape: ModelTensorReshape | None = None
    label_filename: str = ""
    """A file beside config.pbtxt: one class name a line."""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """A tensor that the server makes, to tell a model where the elements of a ragged batch begin and end."""

    kind: BatchInputKind = "BATCH_ELEMENT_COUNT"
    target_name: tuple[str, ...] = ()
    data_type: DataTypeName = "TYPE_INVALID"
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutput:
    """Outputs of a ragged batch that are cut apart by the shapes of an input."""

    target_name: tuple[str, ...] = ()
    kind: BatchOutputKind = "BATCH_SCATTER_WITH_INPUT_SHAPE"
    source_input: tuple[str, ...] = ()
