"""Runs the handler of a TorchServe archive, which is unpacked in the directory ``archive`` beside this file.

A row of ``body`` is the body of one TorchServe request; with the request parameter ``content_type`` of
``application/json`` the handler gets it parsed, as from TorchServe. A row of ``prediction`` is the answer.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import triton_python_backend_utils as pb_utils

ARCHIVE = Path(__file__).resolve().with_name("archive")


class Metrics:
    """Takes the metrics that a handler records, and drops them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: self


class Context:
    """What a handler learns about its model and its requests, with TorchServe's attributes."""

    def __init__(self, manifest: dict[str, Any], gpu: int | None, batch: int) -> None:
        model = manifest["model"]
        self.manifest = manifest
        self.model_name = str(model.get("modelName", ""))
        self.system_properties = {
            "model_dir": str(ARCHIVE),
            "gpu_id": gpu,
            "batch_size": batch,
            "server_name": "Nerite",
            "server_version": "0",
        }
        self.model_yaml_config: dict[str, Any] = {}
        if model.get("configFile"):
            yaml = importlib.import_module("yaml")
            self.model_yaml_config = yaml.safe_load((ARCHIVE / model["configFile"]).read_text()) or {}
        self.metrics = Metrics()
        self.request_ids: dict[int, str] = {}
        self.headers: list[dict[str, str]] = []
        self.statuses: dict[int, tuple[int, str]] = {}

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of a request."""
        return self.request_ids.get(idx)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        """Return the header fields of a request."""
        return self.headers[idx]

    def get_request_header(self, idx: int, key: str, exclude: str | None = None) -> str | None:
        """Return a header field of a request."""
        return self.headers[idx].get(key.lower())

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of an answer; any but 200 becomes an error."""
        self.statuses[idx] = code, phrase

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set the status of all answers."""
        for idx in range(len(self.headers)):
            self.set_response_status(code, phrase, idx)

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Accept a content type, which tensors do not have."""

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Accept a header field, which tensors do not have."""


class TritonPythonModel:
    """Takes ``body``, and returns ``prediction``: text and bytes as they are, anything else as JSON."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Import the handler, and have it load its model."""
        manifest = json.loads((ARCHIVE / "MAR-INF" / "MANIFEST.json").read_text())
        gpu = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        batch = max(json.loads(args["model_config"]).get("max_batch_size", 0), 1)
        self.context = Context(manifest, gpu, batch)
        sys.path.insert(0, str(ARCHIVE))
        file, _, entry = manifest["model"]["handler"].partition(":")
        module = self.module(file)
        function = getattr(module, entry or "handle", None)
        if callable(function):
            self.handle = function
            function(None, self.context)  # as TorchServe has it load its model
            return
        own = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
        own = [each for each in own if callable(getattr(each, "handle", None))]
        if len(own) != 1:
            raise pb_utils.TritonModelException(f"{file} needs a function handle, or one class that has it: {len(own)}")
        service: Any = own[0]()
        service.initialize(self.context)
        self.handle = service.handle

    def module(self, file: str) -> ModuleType:
        """Import the handler: a file of the archive, or one of TorchServe's own."""
        if not file.endswith(".py"):
            return importlib.import_module(f"ts.torch_handler.{file}")
        spec = importlib.util.spec_from_file_location(Path(file).stem, ARCHIVE / file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    def execute(self, requests: list[Any]) -> list[Any]:
        """Hand the rows of all requests to the handler as one batch."""
        data: list[dict[str, Any]] = []
        counts: list[int] = []
        context = self.context
        context.headers, context.statuses, context.request_ids = [], {}, {}
        for request in requests:
            given = json.loads(request.parameters() or "{}")
            kind = str(given.get("content_type", "application/octet-stream"))
            tensor: Any = pb_utils.get_input_tensor_by_name(request, "body")
            rows = tensor.as_numpy().reshape(-1)
            for row in rows:
                context.request_ids[len(data)] = request.request_id()
                context.headers.append({"content-type": kind})
                data.append({"body": json.loads(row) if kind.startswith("application/json") else bytes(row)})
            counts.append(len(rows))
        context.system_properties["batch_size"] = len(data)
        answers = self.handle(data, context)
        if not isinstance(answers, list) or len(answers) != len(data):
            raise pb_utils.TritonModelException(f"the handler did not return a list of {len(data)} answers")
        responses, at = [], 0
        for count in counts:
            responses.append(self.response(at, answers[at : at + count]))
            at += count
        return responses

    def response(self, first: int, answers: list[Any]) -> Any:
        """Return the response to a request with the rows from ``first``."""
        for idx in range(first, first + len(answers)):
            code, phrase = self.context.statuses.get(idx, (200, ""))
            if code != 200:
                error = pb_utils.TritonError(f"the handler answered with status {code} {phrase}".rstrip())
                return pb_utils.InferenceResponse(error=error)
        rows = np.array([[self.encoded(each)] for each in answers], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("prediction", rows)])

    def encoded(self, answer: Any) -> bytes:
        """Return an answer as bytes."""
        if isinstance(answer, bytes | bytearray):
            return bytes(answer)
        return answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
