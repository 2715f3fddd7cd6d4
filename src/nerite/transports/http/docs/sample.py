"""A request that a model's signature accepts, and the curl command that sends it."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any, Final, NamedTuple

from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.signature import Input, Signature
from nerite.transports.http.json_tensors import HALVES

_MOST_IN_JSON: Final = 16
"""A tensor of more elements is not something to paste."""
_MOST_IN_A_FORM: Final = 4096
"""The generate extension knows nothing but JSON, and a command line has its limits."""
NO_SAMPLE: Final = "No command is short enough for these tensors, or JSON lacks their type: use gRPC."
_SIZE_OF_NO_TEXT: Final = 4
"""Bytes of an element of BYTES that is empty: its length."""


class Sample(NamedTuple):
    """A request: zeros, false and short texts, in the smallest shapes that are allowed."""

    body: dict[str, Any]
    zeros: int = 0
    """Zero bytes behind the JSON, for the tensors that are not in it."""
    binary: bool = False
    """The answer has tensors behind its JSON."""
    streams: bool = False
    """The answer comes in pieces."""

    @property
    def text(self) -> str:
        """The body as JSON."""
        return json.dumps(self.body)

    @property
    def brief(self) -> bool:
        """The request and its answer are text, and nothing else."""
        return not self.zeros and not self.binary

    def curl(self, url: str, key_header: str = "") -> str:
        """Return a command for a POSIX shell. The key, where one is needed, is expected in the variable ``KEY``."""
        words = ["curl", *(["-N"] if self.streams else []), shlex.quote(url)]
        if key_header:
            words.append(f'-H {shlex.quote(f"{key_header}: ")}"$KEY"')
        if self.binary:
            words.append("--output answer.bin")
        text = shlex.quote(self.text)
        if not self.zeros:
            return " ".join([*words, "-d", text])
        words += ["-H", f"'Inference-Header-Content-Length: {len(self.text)}'", "--data-binary @-"]
        return f"(printf %s {text}; head -c {self.zeros} /dev/zero) | {' '.join(words)}"


def sample_of(signature: Signature, *, decoupled: bool) -> Sample | None:
    """Return a request for ``infer``, or for ``generate_stream`` if the model is ``decoupled``.

    None where the latter cannot carry the tensors.
    """
    wanted = [declared for declared in signature.inputs.values() if not declared.optional]
    batch = (1,) if signature.max_batch_size > 0 else ()
    shapes = {declared.name: (*batch, *(1 if size == -1 else size for size in declared.dims)) for declared in wanted}
    outside = any(declared.datatype in HALVES for declared in signature.outputs.values())
    if decoupled:
        counts = [math.prod(shape) for shape in shapes.values()]
        if outside or sum(counts) > _MOST_IN_A_FORM or any(declared.datatype in HALVES for declared in wanted):
            return None
        body = {declared.name: _data(declared, count) for declared, count in zip(wanted, counts, strict=True)}
        return Sample(body, streams=True)
    inputs = [_input(declared, shapes[declared.name]) for declared in wanted]
    zeros = sum(each["parameters"]["binary_data_size"] for each in inputs if "parameters" in each)
    asked = {"parameters": {"binary_data_output": True}} if outside else {}
    return Sample({"inputs": inputs, **asked}, zeros, outside)


def _input(declared: Input, shape: tuple[int, ...]) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": declared.name, "datatype": declared.datatype.name, "shape": list(shape)}
    count = math.prod(shape)
    if count > _MOST_IN_JSON or declared.datatype in HALVES:
        return tensor | {"parameters": {"binary_data_size": count * (declared.datatype.size or _SIZE_OF_NO_TEXT)}}
    return tensor | {"data": _data(declared, count)}


def _data(declared: Input, count: int) -> list[object]:
    return [_element(declared.datatype)] * count


def _element(datatype: DataType) -> object:
    if datatype is dtypes.BYTES:
        return "text"
    if datatype is dtypes.BOOL:
        return False
    return 0.0 if datatype in (dtypes.FP32, dtypes.FP64) else 0
