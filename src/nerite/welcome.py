"""What a server says when it is up: what it serves, where, and a command that tries it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

from nerite import __version__
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.signature import Signature
from nerite.server import InferenceServer

_MOST_ELEMENTS = 16
"""A sample request with more elements than this would not be something to paste."""


def lines(server: InferenceServer, ports: Mapping[str, int], address: str) -> list[str]:
    """Return the lines, given the port of each service that is open."""
    host = "localhost" if address in ("0.0.0.0", "::", "") else address
    ready = [record for record in server.manager.records if record.running]
    failed = [record.name for record in server.manager.records if record.states and not record.running]
    said = [f"Nerite {__version__} serves {_count(len(ready), 'model')}" + _failures(failed)]
    where = [f"{name} {host}:{port}" for name, port in ports.items()]
    said.append(f"Listening: {', '.join(where)}")
    if "HTTP" not in ports:
        return said
    url = f"http://{host}:{ports['HTTP']}"
    if ready:
        said.append(f"Try it: {_command({record.name: record.find('').signature for record in ready}, url)}")
    else:
        said.append(f"Load a model: curl -X POST {url}/v2/repository/models/NAME/load")
    return said


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _failures(names: list[str]) -> str:
    return f"; {_count(len(names), 'model')} failed to load: {', '.join(names)} (why: see above)" if names else ""


def _command(signatures: Mapping[str, Signature], url: str) -> str:
    """Return a curl command that works: an inference by the first model for which that is short, else a look at one."""
    for model, signature in signatures.items():
        body = sample_request(signature)
        if body is not None:
            return f"curl {url}/v2/models/{model}/infer -d {shlex.quote(json.dumps(body))}"
    return f"curl {url}/v2/models/{next(iter(signatures))}"


def sample_request(signature: Signature) -> dict[str, Any] | None:
    """Return a JSON infer request of zeros and empty strings; None if it would be long, or JSON cannot carry it."""
    tensors = []
    batch = (1,) if signature.max_batch_size > 0 else ()
    for declared in signature.inputs.values():
        if declared.optional:
            continue
        shape = (*batch, *(1 if size == -1 else size for size in declared.dims))
        count = math.prod(shape)
        if count > _MOST_ELEMENTS or declared.datatype in (dtypes.FP16, dtypes.BF16):
            return None
        tensors.append(
            {
                "name": declared.name,
                "datatype": declared.datatype.name,
                "shape": list(shape),
                "data": [_sample(declared.datatype)] * count,
            }
        )
    return {"inputs": tensors}


def _sample(datatype: DataType) -> object:
    if datatype is dtypes.BYTES:
        return "text"
    if datatype is dtypes.BOOL:
        return False
    return 0.0 if datatype in (dtypes.FP32, dtypes.FP64) else 0
