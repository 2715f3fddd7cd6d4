"""``nerite client infer``: Run a model, and print what it answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from nerite.cli.client import samples
from nerite.cli.client.outputs import as_json, as_table
from nerite.cli.client.values import parameter, read_inputs
from nerite.cli.command import show, show_json
from nerite.client import Client, ClientError, Model, TensorDescription, infer_form
from nerite.client.random_value import random_value
from nerite.observability.table import terminal_width

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(client: Client, options: argparse.Namespace) -> int:
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
        _record(options.record, infer_form.as_line(model, inputs, options.output, dict(options.parameter)))
    return 0


def _record(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise ClientError(f"the request cannot be recorded in {path}: {error.strerror}") from None


def _once(client: Client, options: argparse.Namespace, model: Model, inputs: dict[str, object]) -> None:
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
    client: Client, options: argparse.Namespace, model: Model, inputs: dict[str, object], error: ClientError
) -> str:
    """Return what cures an error: the inputs that are missing, or the way to a model of many responses."""
    if error.status == 501 and "decoupled" in str(error):
        return "\n    Run it with --stream."
    if error.status != 400:
        return ""
    needed = _needed(client, model, options.version)
    missing = [tensor for tensor in needed if tensor.name not in inputs]
    return f"\n{samples.advice(model, needed, missing, options.url)}" if missing else ""


def _needed(client: Client, model: Model, version: str) -> list[TensorDescription]:
    """Return the inputs that a request has to have."""
    try:
        config = client.config(model.name, version)
    except ClientError:
        # Not every server tells configurations, and without them nothing is known to be optional.
        config = {}
    optional = {entry["name"] for entry in config.get("input", ()) if entry.get("optional")}
    return [tensor for tensor in model.inputs if tensor.name not in optional]
