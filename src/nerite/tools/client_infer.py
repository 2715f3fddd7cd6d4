"""``nerite client infer``: runs a model with inputs from the command line, and prints its outputs."""

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

from nerite.cli.command import UsageError, add_repeated, did_you_mean, show, show_json
from nerite.client import Client, ClientError, ModelDescription, TensorDescription, tensors
from nerite.client.tensors import random_value, smallest
from nerite.core import tensor as dtypes
from nerite.core.sample_inputs import Sizes
from nerite.core.tensor import Array, from_numpy
from nerite.core.text import render_table, terminal_width
from nerite.tools.trial_inputs import (
    Shapes,
    add_shape_option,
    check_shapes,
    chosen_shapes,
    first_answered,
    may_be_of_shape,
    shapes_to_try,
    sizes_advice,
    variable_inputs,
)

_MAX_ELEMENTS_SHOWN = 32
"""Larger arrays are abbreviated to their beginning and end."""


def as_table(model: ModelDescription, outputs: Mapping[str, Array], width: int) -> str:
    """Return outputs as a human-readable table, no wider than ``width``."""
    rows = [
        (name, _datatype(model, name, array), str(list(array.shape)), _shown(array)) for name, array in outputs.items()
    ]
    return render_table(("Output", "Datatype", "Shape", "Values"), rows, width)


def as_json(model: ModelDescription, outputs: Mapping[str, Array]) -> dict[str, Any]:
    """Return outputs as a JSON-serialisable document; bytes that are not valid UTF-8 become ``{"base64": …}``."""
    return {
        name: {
            "datatype": _datatype(model, name, array),
            "shape": list(array.shape),
            "data": (_texts(array, _text_or_base64) if array.dtype == object else array).tolist(),
        }
        for name, array in outputs.items()
    }


def _datatype(model: ModelDescription, name: str, array: Array) -> str:
    # BF16 outputs are returned as float32, so the array's dtype does not reveal them.
    described = {tensor.name: tensor.datatype for tensor in model.outputs}
    if name in described and described[name] == "BF16":
        return "BF16"
    datatype = from_numpy(array.dtype)
    return datatype.name if datatype else str(array.dtype)


def _shown(array: Array) -> str:
    if array.dtype == object:
        array = _texts(array, _escaped_text)
        if array.size == 1:
            return str(array.flat[0])
    return np.array2string(array, threshold=_MAX_ELEMENTS_SHOWN, separator=", ", max_line_width=100)


def _texts(array: Array, text_of: Callable[[bytes], object]) -> Array:
    texts = np.empty(array.size, object)
    texts[:] = [text_of(element) for element in array.flat]
    return texts.reshape(array.shape)


def _escaped_text(element: bytes) -> str:
    return element.decode(errors="backslashreplace")


def _text_or_base64(element: bytes) -> object:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(element).decode()}


_MAX_EXAMPLE_ELEMENTS = 16
"""Examples with larger inputs would be unreadable, and are not printed."""


def advice(
    model: ModelDescription, needed: Sequence[TensorDescription], missing: Sequence[TensorDescription], url: str
) -> str:
    """Return a message about missing inputs: their names, types and shapes, and an example command that works."""
    lines = ["Missing inputs:", *(f"  {tensor}" for tensor in missing)]
    server = [] if url == "localhost:8000" else ["--url", url]
    command = ["nerite", "client", *server, "infer", model.name]
    if all(math.prod(smallest(tensor)) <= _MAX_EXAMPLE_ELEMENTS for tensor in needed):
        lines.append(f"Example:  {shlex.join([*command, *map(_example, needed)])}")
    return "\n".join([*lines, f"Try random data:  {shlex.join([*command, '--random'])}"])


def _example(tensor: TensorDescription) -> str:
    shape = smallest(tensor)
    if tensor.datatype == "BYTES":
        data: object = np.full(shape, "text", object).tolist()
        return f"{tensor.name}={'text' if math.prod(shape) == 1 else json.dumps(data)}"
    kind = dtypes.BY_NAME[tensor.datatype].numpy.kind
    return f"{tensor.name}={json.dumps(np.zeros(shape, bool if kind == 'b' else int).tolist())}"


# Values on the command line: JSON, plain text, or a file.


def read_inputs(model: ModelDescription, words: Sequence[str]) -> dict[str, object]:
    """Parse ``NAME=VALUE`` words into the inputs that ``Client.infer`` takes. Raises ``UsageError``."""
    described = {tensor.name: tensor for tensor in model.inputs}
    inputs: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"'{word}' is not an input.", remedy="Write it as NAME=VALUE.")
        if name not in described:
            known = f"Its inputs: {', '.join(described) or 'none'}."
            remedy = did_you_mean(name, described) or known
            raise UsageError(f"model '{model.name}' has no input '{name}'.", remedy=remedy)
        inputs[name] = _value(described[name], text)
    return inputs


def parameter(word: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE`` into a parameter whose value is JSON or else text. Raises ``ValueError`` without a ``=``."""
    name, equals, text = word.partition("=")
    if not equals:
        raise ValueError(word)
    return name, _json(text, text)


def content(path: str) -> bytes:
    """Return the content of a file. Raises ``UsageError`` if it cannot be read."""
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
        raise UsageError(f"input {tensor}: '{text}' is not JSON.", remedy=remedy)
    return value


def _file(tensor: TensorDescription, path: str) -> object:
    raw = content(path)
    if path.endswith(".npy"):
        try:
            return np.load(io.BytesIO(raw), allow_pickle=False)
        except ValueError as error:
            raise UsageError(f"cannot read an array from '{path}': {error}") from error
    if tensor.datatype == "BYTES":
        return raw
    if tensor.datatype == "UINT8":
        return np.frombuffer(raw, np.uint8)
    remedy = "Save the array with numpy.save, and pass the .npy file."
    raise UsageError(f"input {tensor}: raw bytes as in '{path}' do not fit this datatype.", remedy=remedy)


def _json(text: str, otherwise: object) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_text, value)))


def random_inputs(
    needed: Sequence[TensorDescription], shapes: Mapping[str, Sizes], *, batching: bool
) -> dict[str, object]:
    """Return random data for inputs: a batch of one, or of shapes without batch. Raises ``InvalidArgument``."""
    sizes = Shapes(int(batching), shapes)
    return {tensor.name: random_value(tensor, ((1,) if batching else ()) + sizes.of(tensor)) for tensor in needed}


EXAMPLES = """\
A VALUE is one of
  numbers='[1, 2, 3]'     JSON: a number, a string, or lists of them; missing dimensions are added
  prompt='How are you?'   plain text, for inputs of type BYTES
  image=@cat.png          the content of a file, for inputs of type BYTES or UINT8
  pixels=@cat.npy         an array saved by numpy

Examples:
  nerite client infer scaler numbers='[1, 2, 3]'
  nerite client infer scaler                                show which inputs it needs
  nerite client infer resnet --random                       run it with random data
  nerite client infer yolo --random --shape images:3,640,640
  nerite client infer chat prompt=Hello --parameter temperature=0.2 --stream
"""


def add_infer(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("inputs", metavar="NAME=VALUE", nargs="*", help="an input of the model")
    parser.add_argument("--version", default="", help="model version to run (default: chosen by the server)")
    add_repeated(parser, "--output", "NAME", "return only this output")
    add_repeated(parser, "--parameter", "NAME=VALUE", "a request parameter, such as priority=1", parameter)
    parser.add_argument("--random", action="store_true", help="fill missing inputs with random data")
    add_shape_option(parser)
    parser.add_argument(
        "--stream", action="store_true", help="print each response of a decoupled model as a line of JSON as it arrives"
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        type=Path,
        help="append the request to FILE after it succeeds; WARMUP_REQUESTS of a model may name such a file",
    )
    parser.add_argument("--json", action="store_true", help="print datatype, shape and data of each output as JSON")


def run_infer(client: Client, options: argparse.Namespace) -> int:
    """Run the model and print its outputs; return the exit status. Errors list the inputs that are missing."""
    model = client.model(options.model, options.version)
    inputs = read_inputs(model, options.inputs)
    if options.shape and not options.random:
        raise UsageError("--shape is the shape of random data.", remedy="Add --random.")
    run = _stream if options.stream else _once
    try:
        if options.random:
            inputs = _run_with_random_data(client, options, model, inputs, run)
        else:
            run(client, options, model, inputs)
    except ClientError as error:
        raise ClientError(f"{error}{_advice(client, options, model, inputs, error)}", error.status) from error
    if options.record is not None:
        _record(options.record, tensors.as_line(model, inputs, options.output, dict(options.parameter)))
    return 0


def _run_with_random_data(
    client: Client,
    options: argparse.Namespace,
    model: ModelDescription,
    inputs: dict[str, object],
    run: Callable[[Client, argparse.Namespace, ModelDescription, dict[str, object]], None],
) -> dict[str, object]:
    """Run the model with random data for missing inputs, in the first plausible shapes that it accepts.

    Return all inputs. Streams get one element, because their number of responses may depend on the sizes.
    """
    config = _config(client, model, options.version)
    needed = [tensor for tensor in _needed(model, config) if tensor.name not in inputs]
    # A server that does not reveal the configuration has -1 in front of all shapes with a batch.
    most = config.get("max_batch_size", int(all(tensor.shape[:1] == (-1,) for tensor in model.inputs)))
    batching = int(most) > 0
    given = dict(options.shape)
    check_shapes(given, needed, batching=batching)
    attempts = list(shapes_to_try(needed, batching=batching, given=given))[-1 if options.stream else 0 :]

    def ask(shapes: Mapping[str, Sizes]) -> dict[str, object]:
        made = inputs | random_inputs(needed, shapes, batching=batching)
        run(client, options, model, made)
        return made

    free = variable_inputs(needed, given, batching=batching)
    try:
        shapes, made = first_answered(attempts, ask)
    except ClientError as error:
        if not free or not may_be_of_shape(error):
            raise
        advice = sizes_advice(free, batching=batching)
        raise ClientError(f"{error}\n    {advice}", error.status) from error
    if free and not options.json and not options.stream:
        show(chosen_shapes({tensor.name: shapes[tensor.name] for tensor in free}))
    return made


def _record(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise ClientError(f"cannot append the request to {path}: {error.strerror}") from None


def _once(client: Client, options: argparse.Namespace, model: ModelDescription, inputs: dict[str, object]) -> None:
    parameters = dict(options.parameter)
    outputs = client.infer(
        options.model, inputs, outputs=options.output, parameters=parameters, version=options.version
    )
    if options.json:
        show_json(as_json(model, outputs), one_line=True)
    else:
        show(as_table(model, outputs, terminal_width()))


def _stream(client: Client, options: argparse.Namespace, model: ModelDescription, inputs: dict[str, object]) -> None:
    parameters = dict(options.parameter)
    for response in client.stream(options.model, inputs, parameters=parameters, version=options.version):
        show_json(response, one_line=True)


def _advice(
    client: Client, options: argparse.Namespace, model: ModelDescription, inputs: dict[str, object], error: ClientError
) -> str:
    """Return the remedy for an error: the missing inputs, or --stream for a decoupled model."""
    if error.status == 501 and "decoupled" in str(error):
        return "\n    Run it with --stream."
    if error.status != 400 or options.random:
        return ""
    needed = _needed(model, _config(client, model, options.version))
    missing = [tensor for tensor in needed if tensor.name not in inputs]
    return f"\n{advice(model, needed, missing, options.url)}" if missing else ""


def _config(client: Client, model: ModelDescription, version: str) -> Mapping[str, Any]:
    """Return the configuration of a model; empty if the server does not reveal it."""
    try:
        return client.config(model.name, version)
    except ClientError:
        return {}


def _needed(model: ModelDescription, config: Mapping[str, Any]) -> list[TensorDescription]:
    """Return the required inputs of a model; without a configuration, all count as required."""
    optional = {entry["name"] for entry in config.get("input", ()) if entry.get("optional")}
    return [tensor for tensor in model.inputs if tensor.name not in optional]
