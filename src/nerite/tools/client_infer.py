"""``nerite client infer``: Run a model, and print what it answers."""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nerite.cli.command import show, show_json
from nerite.cli.errors import UsageError, did_you_mean
from nerite.client import Client, ClientError, ModelDescription, TensorDescription, tensors
from nerite.client.tensors import random_value, smallest
from nerite.core import tensor as dtypes
from nerite.core.tensor import Array, from_numpy
from nerite.observability.log_records import render, terminal_width

# Tensors to look at, and for machines.

_MOST_ELEMENTS = 32
"""Of an array with more only the beginning and the end are shown."""


def as_table(model: ModelDescription, outputs: Mapping[str, Array], width: int) -> str:
    """Return outputs as a table for people, no wider than ``width``."""
    rows = [
        (name, _datatype(model, name, array), str(list(array.shape)), _shown(array)) for name, array in outputs.items()
    ]
    return render(("Output", "Datatype", "Shape", "Values"), rows, width)


def as_json(model: ModelDescription, outputs: Mapping[str, Array]) -> dict[str, Any]:
    """Return outputs as what can be written as JSON; bytes that are no text become ``{"base64": …}``."""
    return {
        name: {
            "datatype": _datatype(model, name, array),
            "shape": list(array.shape),
            "data": (_texts(array, _for_machines) if array.dtype == object else array).tolist(),
        }
        for name, array in outputs.items()
    }


def _datatype(model: ModelDescription, name: str, array: Array) -> str:
    # BF16 comes as float32, so that the array alone does not tell.
    described = {tensor.name: tensor.datatype for tensor in model.outputs}
    if name in described and described[name] == "BF16":
        return "BF16"
    datatype = from_numpy(array.dtype)
    return datatype.name if datatype else str(array.dtype)


def _shown(array: Array) -> str:
    if array.dtype == object:
        array = _texts(array, _for_people)
        if array.size == 1:
            return str(array.flat[0])
    return np.array2string(array, threshold=_MOST_ELEMENTS, separator=", ", max_line_width=100)


def _texts(array: Array, text_of: Callable[[bytes], object]) -> Array:
    texts = np.empty(array.size, object)
    texts[:] = [text_of(element) for element in array.flat]
    return texts.reshape(array.shape)


def _for_people(element: bytes) -> str:
    return element.decode(errors="backslashreplace")


def _for_machines(element: bytes) -> object:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(element).decode()}


# What to say about inputs that are missing: an example to write after.

_SAMPLES_MOST_ELEMENTS = 16
"""An example with more elements than this would not be something to read."""


def advice(
    model: ModelDescription, needed: Sequence[TensorDescription], missing: Sequence[TensorDescription], url: str
) -> str:
    """Return what to say about inputs that are missing: what they are like, and a command that works."""
    lines = ["Missing inputs:", *(f"  {tensor}" for tensor in missing)]
    server = [] if url == "localhost:8000" else ["--url", url]
    command = ["nerite", "client", *server, "infer", model.name]
    if all(math.prod(smallest(tensor)) <= _SAMPLES_MOST_ELEMENTS for tensor in needed):
        lines.append(f"Example:  {shlex.join([*command, *map(_example, needed)])}")
    return "\n".join([*lines, f"Does it run at all?  {shlex.join([*command, '--random'])}"])


def _example(tensor: TensorDescription) -> str:
    shape = smallest(tensor)
    if tensor.datatype == "BYTES":
        data: object = np.full(shape, "text", object).tolist()
        return f"{tensor.name}={'text' if math.prod(shape) == 1 else json.dumps(data)}"
    kind = dtypes.BY_NAME[tensor.datatype].numpy.kind
    return f"{tensor.name}={json.dumps(np.zeros(shape, bool if kind == 'b' else int).tolist())}"


# Values as people write them on a command line: JSON, plain text, or a file.


def read_inputs(model: ModelDescription, words: Sequence[str]) -> dict[str, object]:
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


EXAMPLES = """\
A VALUE is
  numbers='[1, 2, 3]'     JSON: a number, a text, or lists of them; a list that lacks dimensions gets them
  prompt='How are you?'   for an input of texts (BYTES) simply the text
  image=@cat.png          the content of a file, for BYTES or UINT8
  pixels=@cat.npy         an array that numpy has saved

Examples:
  nerite client infer scaler numbers='[1, 2, 3]'
  nerite client infer scaler                                what does it need?
  nerite client infer resnet --random                       does it run?
  nerite client infer chat prompt=Hello --parameter temperature=0.2 --stream
"""


def add_infer(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("inputs", metavar="NAME=VALUE", nargs="*", help="an input of the model")
    parser.add_argument("--version", default="", help="run this version, and not the one that the server chooses")
    parser.add_argument(
        "--output", metavar="NAME", action="append", default=[], help="return this output; may be given several times"
    )
    parser.add_argument(
        "--parameter",
        metavar="NAME=VALUE",
        action="append",
        type=parameter,
        default=[],
        help="a parameter of the request, such as priority=1; may be given several times",
    )
    parser.add_argument("--random", action="store_true", help="fill the inputs that are not given with random data")
    parser.add_argument(
        "--stream", action="store_true", help="run a model of many responses; print each as a line of JSON as it comes"
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        type=Path,
        help="append the request to FILE once it was answered: the model's WARMUP_REQUESTS may be such a file",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: datatype, shape and data of each output")


def run_infer(client: Client, options: argparse.Namespace) -> int:
    """Infer and print the outputs; return the exit status. Says what is missing where the server refuses."""
    model = client.model(options.model, options.version)
    inputs = read_inputs(model, options.inputs)
    if options.random:
        needed = _needed(client, model, options.version)
        inputs |= {tensor.name: random_value(tensor) for tensor in needed if tensor.name not in inputs}
    try:
        if options.stream:
            _stream(client, options, inputs)
        else:
            _once(client, options, model, inputs)
    except ClientError as error:
        raise ClientError(f"{error}{_advice(client, options, model, inputs, error)}", error.status) from error
    if options.record is not None:
        _record(options.record, tensors.as_line(model, inputs, options.output, dict(options.parameter)))
    return 0


def _record(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise ClientError(f"the request cannot be recorded in {path}: {error.strerror}") from None


def _once(client: Client, options: argparse.Namespace, model: ModelDescription, inputs: dict[str, object]) -> None:
    parameters = dict(options.parameter)
    outputs = client.infer(
        options.model, inputs, outputs=options.output, parameters=parameters, version=options.version
    )
    if options.json:
        show_json(as_json(model, outputs), one_line=True)
    else:
        show(as_table(model, outputs, terminal_width()))


def _stream(client: Client, options: argparse.Namespace, inputs: dict[str, object]) -> None:
    parameters = dict(options.parameter)
    for response in client.stream(options.model, inputs, parameters=parameters, version=options.version):
        show_json(response, one_line=True)


def _advice(
    client: Client, options: argparse.Namespace, model: ModelDescription, inputs: dict[str, object], error: ClientError
) -> str:
    """Return what cures an error: the inputs that are missing, or the way to a model of many responses."""
    if error.status == 501 and "decoupled" in str(error):
        return "\n    Run it with --stream."
    if error.status != 400:
        return ""
    needed = _needed(client, model, options.version)
    missing = [tensor for tensor in needed if tensor.name not in inputs]
    return f"\n{advice(model, needed, missing, options.url)}" if missing else ""


def _needed(client: Client, model: ModelDescription, version: str) -> list[TensorDescription]:
    """Return the inputs that a request has to have."""
    try:
        config = client.config(model.name, version)
    except ClientError:
        # Not every server tells configurations, and without them nothing is known to be optional.
        config = {}
    optional = {entry["name"] for entry in config.get("input", ()) if entry.get("optional")}
    return [tensor for tensor in model.inputs if tensor.name not in optional]
