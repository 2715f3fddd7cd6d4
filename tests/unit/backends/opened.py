"""A model with one instance, opened without a server as the server does it: complete, then open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_models import decoded, request

from nerite.backends.interface import Backend, InstanceContext, Marks, ModelContext
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse


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
    return ModelContext("m", 1, directory, {"name": "m", "parameters": given, **(config or {})}, settings or {})


class Opened:
    def __init__(self, backend: Backend, before: ModelContext) -> None:
        self.config = backend.complete(before)
        self.model = backend.open(replace(before, config=self.config))
        self.instance = self.model.instance(InstanceContext("m_0"))

    def execute(self, *requests: InferenceRequest) -> list[InferenceResponse]:
        return [response for response in self.instance.execute(requests, Marks()) if response is not None]

    def answer(self, outputs: Sequence[str] = (), **arrays: Any) -> dict[str, Any]:
        """Send one request and return its outputs as arrays."""
        return decoded(self.execute(request(outputs, **arrays))[0])
