"""From a configuration to what requests are checked against, class labels included."""

from __future__ import annotations

from pathlib import Path

from nerite.config.model_config import ModelConfig
from nerite.config.tensors import ModelOutput
from nerite.core import dtype
from nerite.core.errors import Internal, Unsupported
from nerite.core.signature import Input, Output, Signature


def signature_of(config: ModelConfig, directory: Path) -> Signature:
    """Return the signature of a model with the complete ``config`` and its files in ``directory``.

    Reads the label files. Raises ``Unsupported`` for one outside of the directory, ``Internal`` for one that cannot be
    read. Of two tensors with one name the first counts.
    """
    inputs = {
        tensor.name: Input(
            tensor.name,
            dtype.BY_CONFIG_NAME[tensor.data_type],
            tensor.dims,
            optional=tensor.optional,
            ragged=tensor.allow_ragged_batch,
            reshape=None if tensor.reshape is None else tensor.reshape.shape,
        )
        for tensor in reversed(config.input)
    }
    outputs = {
        tensor.name: Output(
            tensor.name,
            dtype.BY_CONFIG_NAME[tensor.data_type],
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
    """Return the class names of an output, by index; none where it has no label file. Raises as ``signature_of``."""
    if not output.label_filename:
        return ()
    path = f"{directory}/{output.label_filename}"
    if "\0" in path or not Path(path).resolve().is_relative_to(directory.resolve()):
        raise Unsupported(
            f"label file path '{path}' for output '{output.name}' in model '{model}' is outside model directory"
        )
    try:
        text = Path(path).read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise Internal(f"failed to open text file for read {path}: {error.strerror}") from error
    return tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")) if text else ()
