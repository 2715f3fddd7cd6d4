"""Values as people write them on a command line: JSON, plain text, or a file."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nerite.cli.suggestion import did_you_mean
from nerite.cli.usage_error import UsageError
from nerite.client import Model, TensorDescription


def read_inputs(model: Model, words: Sequence[str]) -> dict[str, object]:
    """Return the inputs that ``NAME=VALUE`` words give, as ``Client.infer`` takes them. Raises ``UsageError``."""
    described = {tensor.name: tensor for tensor in model.inputs}
    inputs: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"'{word}' is no input.", remedy="Write it as NAME=VALUE.")
        if name not in described:
            known = f"Its inputs: {', '.join(described) or 'none'}."
            remedy = did_you_mean(name, described) or known
            raise UsageError(f"model '{model.name}' has no input '{name}'.", remedy=remedy)
        inputs[name] = _value(described[name], text)
    return inputs


def parameter(word: str) -> tuple[str, Any]:
    """Return name and value of a parameter: JSON where it is, else text. Raises ``ValueError`` without a ``=``."""
    name, equals, text = word.partition("=")
    if not equals:
        raise ValueError(word)
    return name, _json(text, text)


def content(path: str) -> bytes:
    """Return what is in a file. Raises ``UsageError``."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}.") from error


def _value(tensor: TensorDescription, text: str) -> object:
    if text.startswith("@"):
        return _file(tensor, text[1:])
    if tensor.datatype == "BYTES":
        value = _json(text, text)
        return value if _is_text(value) else text
    value = _json(text, None)
    if value is None:
        remedy = f"Write numbers as JSON, such as {tensor.name}='[1, 2]', or a file as {tensor.name}=@FILE.npy."
        raise UsageError(f"input {tensor}: '{text}' is no JSON.", remedy=remedy)
    return value


def _file(tensor: TensorDescription, path: str) -> object:
    raw = content(path)
    if path.endswith(".npy"):
        try:
            return np.load(io.BytesIO(raw), allow_pickle=False)
        except ValueError as error:
            raise UsageError(f"'{path}' is no array that can be read: {error}") from error
    if tensor.datatype == "BYTES":
        return raw
    if tensor.datatype == "UINT8":
        return np.frombuffer(raw, np.uint8)
    remedy = "Save the array with numpy.save, and give the .npy file."
    raise UsageError(f"input {tensor}: the bytes of '{path}' are not of that type.", remedy=remedy)


def _json(text: str, otherwise: object) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_text, value)))
