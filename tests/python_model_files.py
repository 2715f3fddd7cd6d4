"""Python models on disk, and requests to them, for the tests of the Python backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nerite.backends.interface import ExecutionTimes, InstanceContext, ModelContext
from nerite.backends.python import PythonBackend
from nerite.backends.python.backend import PythonModel
from nerite.backends.python.instance import PythonInstance
from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import from_array

TENSORS = {
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [
        {"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "OUTPUT1", "data_type": "TYPE_FP32", "dims": [-1]},
    ],
}


def model_on_disk(
    folder: Path, source: str | None, files: dict[str, str] | None = None, version: int = 1, **config: Any
) -> ModelContext:
    """Write a model and return its context; ``files`` are further ones, by their path below the model's directory."""
    directory = folder / str(config.setdefault("name", "m"))
    written = dict(files or {})
    if source is not None:
        written[f"{version}/model.py"] = source
    for name, text in written.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ModelContext(config["name"], version, directory, {"max_batch_size": 0, **TENSORS, **config})


def instance_of(context: ModelContext, instance: InstanceContext | None = None) -> PythonInstance:
    """Open a model and return an instance, the first one. The model is closed when the test is over."""
    model = PythonBackend().open(context)
    _models.append(model)
    return model.instance(instance or InstanceContext(f"{context.name}_0"))


_models: list[PythonModel] = []


def close_models() -> None:
    """Close what ``instance_of`` has opened."""
    while _models:
        _models.pop().close()


def request(*values: object, outputs: Sequence[str] = (), id: str = "", **header: Any) -> InferenceRequest:
    """Return a request with the values as INPUT0, INPUT1, …; without any, INPUT0 is four numbers."""
    arrays = [np.asarray(value) for value in values] or [np.arange(4, dtype=np.float32)]
    tensors = [from_array(f"INPUT{number}", array) for number, array in enumerate(arrays)]
    return InferenceRequest(
        RequestHeader("m", "", [spec for spec, _ in tensors], [RequestedOutput(o) for o in outputs], **header),
        [bytearray(data) for _, data in tensors],
        NOBODY,
        0,
        id,
    )


def execute(instance: PythonInstance, *requests: InferenceRequest) -> list[InferenceResponse]:
    """Execute a batch; one plain request if none is given."""
    return list(instance.execute(requests or (request(),), ExecutionTimes()))


def failure(instance: PythonInstance) -> str:
    """Execute a plain request that fails, with its batch or alone; return the text of the error."""
    try:
        (answer,) = execute(instance)
    except Internal as error:
        return error.message
    assert answer.error is not None
    return answer.error.message


class _Nobody:
    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        raise AssertionError("a backend answers by returning")


NOBODY = _Nobody()
