"""Validates inputs, outputs and the helper tensors of ragged batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from nerite.config.defaults import TENSORRT
from nerite.config.mistake import FieldPath, Mistake, nearest
from nerite.config.model_config import ModelConfig, ModelInput, ModelOutput


def check_inputs(config: ModelConfig) -> Iterator[Mistake]:
    """Find mistakes in the inputs."""
    for index, tensor in enumerate(config.input):
        path = ("input", index)
        yield from _check_tensor(config, "input", tensor, path)
        if tensor.format != "FORMAT_NONE" and len(tensor.dims) != 3:
            yield _mistake(
                config,
                "model input NHWC/NCHW require 3 dims",
                (*path, "format"),
                "Write three dims, or remove 'format'.",
            )
        yield from _check_tensorrt_only(config, "input", tensor, path)


def check_outputs(config: ModelConfig) -> Iterator[Mistake]:
    """Find mistakes in the outputs."""
    for index, tensor in enumerate(config.output):
        path = ("output", index)
        yield from _check_tensor(config, "output", tensor, path)
        yield from _check_tensorrt_only(config, "output", tensor, path)


def check_batch_tensors(config: ModelConfig) -> Iterator[Mistake]:
    """Find mistakes in ``batch_input`` and ``batch_output``."""
    inputs = [tensor.name for tensor in config.input]
    outputs = [tensor.name for tensor in config.output]
    for index, helper in enumerate(config.batch_input):
        path = ("batch_input", index)
        yield from _check_sources(config, "input", helper.kind, helper.source_input, inputs, path)
        if helper.data_type not in ("TYPE_INT32", "TYPE_FP32"):
            message = "batch input data type must be TYPE_INT32 or TYPE_FP32"
            yield _mistake(config, message, (*path, "data_type"), "Write data_type: TYPE_INT32 or TYPE_FP32.")
    for index, cut in enumerate(config.batch_output):
        path = ("batch_output", index)
        yield from _check_sources(config, "output", cut.kind, cut.source_input, inputs, path)
        for place, target in enumerate(cut.target_name):
            where = (*path, "target_name", place)
            if target not in outputs:
                message = f"unknown target output name '{target}'"
                yield _mistake(config, message, where, _one_of(target, outputs, "output"))
            elif target in cut.target_name[:place]:
                message = f"target output name '{target}' can only be specified once"
                yield _mistake(config, message, where, "Remove it here.")


def repeated_names(config: ModelConfig) -> list[str]:
    """Return a warning for each tensor that is declared more than once. The first declaration counts."""
    warnings = []
    for side, tensors in (("input", config.input), ("output", config.output)):
        names = [tensor.name for tensor in tensors]
        warnings += [
            f"model {side} '{name}' is specified more than once for {config.name}; the first one is used"
            for name in dict.fromkeys(names)
            if names.count(name) > 1
        ]
    return warnings


def _mistake(config: ModelConfig, message: str, path: FieldPath, remedy: str) -> Mistake:
    return Mistake(message=f"{message} for {config.name}", path=path, remedy=remedy)


def _one_of(wrong: str, known: Sequence[str], side: str) -> str:
    meant = nearest(wrong, known)
    there = ", ".join(f"'{name}'" for name in known) or "none"
    return f"Did you mean '{meant}'?" if meant else f"Write the name of an {side}. There are: {there}."


def _check_tensor(
    config: ModelConfig, side: Literal["input", "output"], tensor: ModelInput | ModelOutput, path: FieldPath
) -> Iterator[Mistake]:
    if not tensor.name:
        yield _mistake(config, f"model {side} must specify 'name'", path, 'Write name: "…".')
        return
    head = f"model {side} '{tensor.name}'"
    if tensor.data_type == "TYPE_INVALID":
        remedy = "Write its type, as in: data_type: TYPE_FP32"
        yield _mistake(config, f"{head} must specify 'data_type'", (*path, "data_type"), remedy)
    if not tensor.dims:
        shape = "without the batch dimension" if config.max_batch_size > 0 else "-1 for any size"
        remedy = f"Write its shape, {shape}, as in: dims: [ 3, 224, 224 ]"
        yield _mistake(config, f"{head} must specify 'dims'", (*path, "dims"), remedy)
    yield from _check_reshape(config, head, tensor, path)


def _check_reshape(
    config: ModelConfig, head: str, tensor: ModelInput | ModelOutput, path: FieldPath
) -> Iterator[Mistake]:
    """Find mistakes in ``dims`` and ``reshape``, separately and in combination."""
    reshape = tensor.reshape
    where = (*path, "reshape")
    if reshape is not None and not reshape.shape and config.max_batch_size == 0:
        message = f"{head} cannot have empty reshape for non-batching model as scalar tensors are not supported"
        remedy = "Write reshape { shape: [ 1 ] }, or remove 'reshape'."
        yield _mistake(config, message, where, remedy)
        return
    tail = "must be integer >= 1, or -1 to indicate a variable-size dimension"
    sound = bool(tensor.dims)
    for index, dim in enumerate(tensor.dims):
        if dim < 1 and dim != -1:
            sound = False
            remedy = f"Write a size in place of {dim}, or -1 for any size."
            yield _mistake(config, f"{head} dimension {tail}", (*path, "dims", index), remedy)
    if reshape is None:
        return
    for index, dim in enumerate(reshape.shape):
        if dim < 1 and dim != -1:
            sound = False
            remedy = f"Write a size in place of {dim}, or -1 for any size."
            yield _mistake(config, f"{head} reshape dimensions {tail}", (*where, "shape", index), remedy)
    if not sound or (not reshape.shape and _between_variable(tensor.dims) == [1]):
        return
    dims, shape = _between_variable(tensor.dims), _between_variable(reshape.shape)
    one_is_fixed = min(len(dims), len(shape)) == 1
    if len(dims) != len(shape) and not one_is_fixed:
        message = f"{head} has different number of variable-size dimensions for dims and reshape"
        remedy = f"dims has -1 {len(dims) - 1} times and reshape {len(shape) - 1} times: write as many in both."
        yield _mistake(config, message, (*where, "shape"), remedy)
    elif dims != shape or not reshape.shape:
        message = f"{head} has different size for dims and reshape"
        remedy = (
            f"Both must have the same number of elements: dims is {list(tensor.dims)}, reshape {list(reshape.shape)}."
        )
        yield _mistake(config, message, (*where, "shape"), remedy)


def _between_variable(shape: Sequence[int]) -> list[int]:
    """Return the element counts before, between and behind the variable dimensions of ``shape``."""
    counts = [1]
    for dim in shape:
        if dim == -1:
            counts.append(1)
        else:
            counts[-1] *= dim
    return counts


def _check_tensorrt_only(
    config: ModelConfig, side: Literal["input", "output"], tensor: ModelInput | ModelOutput, path: FieldPath
) -> Iterator[Mistake]:
    tensorrt = config.platform == TENSORRT
    if tensor.is_shape_tensor and not tensorrt:
        message = "shape tensors are only supported for TensorRT platform"
        yield _mistake(config, message, (*path, "is_shape_tensor"), "Remove 'is_shape_tensor'.")
    if tensor.is_non_linear_format_io:
        where = (*path, "is_non_linear_format_io")
        if not tensorrt:
            message = "Non-linear IO format is only supported for the TensorRT platform"
            yield _mistake(config, message, where, "Remove 'is_non_linear_format_io'.")
        elif len(tensor.dims) != 3:
            yield _mistake(config, f"Non-linear IO format {side} requires 3 dims", where, "Write three dims.")


def _check_sources(
    config: ModelConfig,
    side: Literal["input", "output"],
    kind: str,
    sources: Sequence[str],
    inputs: Sequence[str],
    path: FieldPath,
) -> Iterator[Mistake]:
    if len(sources) != 1:
        message = f"batch {side} kind '{kind}' expects 1 source input, got {len(sources)}"
        yield _mistake(config, message, (*path, "source_input"), 'Write one, as in: source_input: "…"')
    for place, source in enumerate(sources):
        if source not in inputs:
            message = f"unknown source input name '{source}'"
            yield _mistake(config, message, (*path, "source_input", place), _one_of(source, inputs, "input"))
