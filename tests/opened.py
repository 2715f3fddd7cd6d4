"""What it takes to open and call a model without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from configs import as_backends_get_it
from nerite.backends.interface import Backend, ExecutionTimes, InstanceContext, ModelContext
from nerite.core import tensor as dtypes
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import TensorSpec, encode_bytes, to_array


def placed(directory: Path, artifact: Path, filename: str) -> Path:
    """Put an artifact into version 1 of the model in ``directory``; return where it is."""
    path = directory / "1" / filename
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(artifact)
    return path


def context(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    settings: Mapping[str, str] | None = None,
    **parameters: str,
) -> ModelContext:
    """Return the context of the model in ``directory``, with these ``parameters`` in its configuration."""
    given = {key: {"string_value": value} for key, value in parameters.items()}
    return ModelContext("m", 1, directory, as_backends_get_it({"parameters": given, **(config or {})}), settings or {})


class Opened:
    """A model with one instance, opened as the server does it: complete, then open."""

    def __init__(self, backend: Backend, before: ModelContext, kind: str = "CPU") -> None:
        self.config = backend.complete(before)
        self.model = backend.open(replace(before, config=self.config))
        self.instance = self.model.instance(InstanceContext("m_0", kind))

    def execute(self, *requests: InferenceRequest) -> list[InferenceResponse]:
        return [response for response in self.instance.execute(requests, ExecutionTimes()) if response is not None]

    def answers(self, *requests: InferenceRequest) -> list[dict[str, Any]]:
        """Send a batch and return the outputs of each request as arrays."""
        return [decoded(response) for response in self.execute(*requests)]

    def answer(self, outputs: Sequence[str] = (), **arrays: Any) -> dict[str, Any]:
        """Send one request and return its outputs as arrays."""
        return self.answers(request(outputs, **arrays))[0]

    def close(self) -> None:
        self.instance.close()
        self.model.close()


def header(specs: Sequence[tuple[str, dtypes.DataType, tuple[int, ...]]], outputs: Sequence[str] = ()) -> RequestHeader:
    made = RequestHeader("m", "", [TensorSpec(*spec) for spec in specs], [RequestedOutput(name) for name in outputs])
    # What validation does; a model without a batch dimension does not look at it.
    made.batch_size = specs[0][2][0] if specs and specs[0][2] else 1
    return made


def request(outputs: Sequence[str] = (), *, bfloat16: bool = False, **arrays: Any) -> InferenceRequest:
    """Return a request with these arrays as inputs; ``bfloat16``: 16-bit words are that type."""
    specs, data = [], []
    for name, value in arrays.items():
        array = np.asarray(value)
        datatype = dtypes.BF16 if bfloat16 and array.dtype == np.uint16 else dtypes.from_numpy(array.dtype)
        assert datatype is not None
        specs.append((name, datatype, array.shape))
        data.append(encode_bytes(array) if datatype is dtypes.BYTES else array.tobytes())
    return bare(header(specs, outputs), data)


def bare(request_header: RequestHeader, data: Sequence[bytes]) -> InferenceRequest:
    return InferenceRequest(request_header, data, _Nobody(), 0)


class _Nobody:
    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        raise AssertionError("a backend returns responses, it does not send them")


def decoded(response: InferenceResponse) -> dict[str, Any]:
    if response.error is not None:
        raise response.error
    assert response.header is not None
    return {spec.name: to_array(spec, data) for spec, data in zip(response.header.outputs, response.data, strict=True)}
