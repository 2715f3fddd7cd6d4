"""Derives from a configuration what requests are validated against: the signature, class labels, initial states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from nerite.config.model_config import ModelConfig, ModelOutput, ModelSequenceBatching
from nerite.core import tensor as dtypes
from nerite.core.bounded_files import read_bounded
from nerite.core.client_text import check_inside_directory
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import BY_CONFIG_NAME


def signature_of(config: ModelConfig, directory: Path) -> Signature:
    """Return the signature of a model with the complete ``config`` and its files in ``directory``.

    Reads the label files. Raises ``Unsupported`` for a label file outside the directory, and ``Internal`` for one that
    cannot be read. Of two tensors with one name the first counts.
    """
    inputs = {
        tensor.name: SignatureInput(
            tensor.name,
            BY_CONFIG_NAME[tensor.data_type],
            tensor.dims,
            optional=tensor.optional,
            ragged=tensor.allow_ragged_batch,
            reshape=None if tensor.reshape is None else tensor.reshape.shape,
        )
        for tensor in reversed(config.input)
    }
    outputs = {
        tensor.name: SignatureOutput(
            tensor.name,
            BY_CONFIG_NAME[tensor.data_type],
            tensor.dims,
            read_labels(config.name, tensor, directory),
            None if tensor.reshape is None else tensor.reshape.shape,
        )
        for tensor in reversed(config.output)
    }
    return Signature(
        config.name,
        config.max_batch_size,
        list(reversed(inputs.values())),
        list(reversed(outputs.values())),
    )


def read_labels(model: str, output: ModelOutput, directory: Path) -> tuple[str, ...]:
    """Return the class names of an output, by index; none if it has no label file. Raises like ``signature_of``."""
    if not output.label_filename:
        return ()
    path = f"{directory}/{output.label_filename}"
    if "\0" in path or not Path(path).resolve().is_relative_to(directory.resolve()):
        raise Unsupported(
            f"label file path '{path}' for output '{output.name}' in model '{model}' is outside model directory"
        )
    try:
        text = read_bounded(Path(path)).decode("utf-8", "replace")
    except OSError as error:
        raise Internal(f"failed to open text file for read {path}: {error.strerror}") from error
    return tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")) if text else ()


FOLDER: Final = "initial_state"
"""Directory of a model with the initial values of the states of sequences."""


def initial_dims(state: ModelSequenceBatching.State) -> tuple[int, ...]:
    """Return the shape of a state before the first request, without the batch dimension. Variable sizes are 1."""
    dims = state.initial_state[0].dims if state.initial_state else state.dims
    return tuple(1 if dim == -1 else dim for dim in dims)


def read_initial_state(state: ModelSequenceBatching.State, directory: Path) -> bytes:
    """Return the data of a valid state before the first request: that of its file, or zeros, or empty strings.

    Blocks on file I/O. Raises Triton's errors about a file in ``directory``.
    """
    elements = math.prod(initial_dims(state))
    datatype = dtypes.BY_CONFIG_NAME[state.data_type]
    initial = state.initial_state[0] if state.initial_state else ModelSequenceBatching.InitialState()
    if initial.data_file is None:
        return bytes(elements * (datatype.size or 4))
    content = _content(state.input_name, initial.data_file, directory / FOLDER)
    if datatype is dtypes.BYTES:
        _check_strings(state.input_name, content, elements)
        return content
    size = elements * datatype.size
    if len(content) < size:
        # The missing space is Triton's.
        raise InvalidArgument(
            f"initial_state setting expects {size} bytes, but the data provided from {initial.data_file}only has "
            f"{len(content)} bytes."
        )
    return content[:size]


def _content(name: str, file: str, folder: Path) -> bytes:
    path = folder / file
    check_inside_directory(file, f"initial_state data file '{file}' of state input '{name}'", folder)
    try:
        return path.read_bytes()
    except OSError as error:
        raise Internal(f"failed to open text file for read {path}: {error.strerror}") from None


def _check_strings(name: str, content: bytes, expected: int) -> None:
    at = found = 0
    while at + 4 <= len(content):
        at += 4 + int.from_bytes(content[at : at + 4], "little")
        found += at <= len(content)
    if found != expected or at != len(content):
        raise InvalidArgument(f"expected {expected} strings for inference input '{name}', got {found}")
