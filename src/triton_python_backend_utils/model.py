"""The configuration for ``auto_complete_config``, and the functions about models: directory, look-up, load, unload."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nerite.core import model_calls
from nerite.core.errors import NeriteError
from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import Mismatch, Text
from triton_python_backend_utils.errors import TritonModelException, incompatible_call
from triton_python_backend_utils.request import InferenceRequest
from triton_python_backend_utils.response import InferenceResponse
from triton_python_backend_utils.tensor import Tensor


class ModelConfig:
    """Configuration that ``auto_complete_config`` receives, completes and returns.

    A change that contradicts config.pbtxt raises ``ValueError`` with Triton's text.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration. Only changes to fields that a model may set have an effect."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the maximum batch size; it may be raised but not lowered."""
        specified = self._model_config.get("max_batch_size", 0)
        if specified > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {specified}, but in auto-complete-config function for "
                f"model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable the dynamic batcher, with defaults if it is not configured."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Declare an input: ``name``, ``data_type``, ``dims``, and optionally ``optional``."""
        self._add("input", input, ("optional",), "'name', 'data_type', 'dims' and 'optional'")

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Declare an output: ``name``, ``data_type``, ``dims``."""
        self._add("output", output, (), "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, bool]) -> None:
        """Set whether the model is decoupled."""
        if not transaction_policy_dict.keys() <= {"decoupled"}:
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                "property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        for key, value in transaction_policy_dict.items():
            if policy.get(key, value) != value:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                    f"already set to '{policy[key]}'."
                )
            policy[key] = value

    @property
    def _name(self) -> str:
        return str(self._model_config.get("name", ""))

    def _add(self, kind: str, tensor: Mapping[str, Any], more: tuple[str, ...], allowed: str) -> None:
        place = f"in auto-complete-config function for model '{self._name}'"
        if "name" not in tensor:
            raise ValueError(f"{kind} {place} is missing 'name' property.")
        name = tensor["name"]
        if not tensor.keys() <= {"name", "data_type", "dims", *more}:
            raise ValueError(f"{kind} '{name}' {place} contains property other than {allowed}.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{name}' {place} is missing '{key}' property.")
        tensors = self._model_config.setdefault(kind, [])
        for declared in tensors:
            if declared["name"] == name:
                self._agree(kind, declared, tensor)
                declared.update(tensor)
                return
        tensors.append(dict(tensor))

    def _agree(self, kind: str, declared: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        name = given["name"]
        data_type = declared.get("data_type", "TYPE_INVALID")
        if data_type not in ("TYPE_INVALID", given["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {data_type} for {kind} "
                f"'{name}', model provides {given['data_type']}"
            )
        for key in ("dims", "optional"):
            here, there = declared.get(key), given.get(key)
            specified = bool(here) if key == "dims" else here is not None and there is not None
            if specified and here != there:
                raise ValueError(
                    f"model '{self._name}', tensor '{name}': the model expects {key} {there} but the model "
                    f"configuration specifies {key} {here}"
                )


# The directory of the calling model.
#
# A process may run several models, so the call stack identifies the model: it is that of the innermost frame whose file
# is in the directory of an open model. The code of a Python-based backend is in none of them, so its model must be
# alone in its process, as it is in a worker.

_open: list[tuple[str, str]] = []


def opened(model: Path, version: Path) -> None:
    """Register a model that runs in this process: directory ``model``, artifacts in ``version``. For the server."""
    _open.append((str(model), str(version)))


def closed(model: Path, version: Path) -> None:
    """Undo ``opened``."""
    _open.remove((str(model), str(version)))


def get_model_dir() -> str:
    """Return the version directory of the calling model, which contains its artifacts.

    Raises ``TritonModelException`` if no model runs, or if several run and none of them is the caller.
    """
    versions = {version for _, version in _open}
    if len(versions) == 1:
        return versions.pop()
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        # Prefer a version's own files to those shared by a model's versions, and the most recently opened model.
        for place in (1, 0):
            for entry in reversed(_open):
                if file.startswith(f"{entry[place]}/"):
                    return entry[1]
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    message = "get_model_dir() can only be called by a model that is being served."
    if versions:
        message += " Several run in this process: use model_repository and model_version of initialize's arguments."
    raise TritonModelException(message)


# Look-up of tensors and their configurations by name.


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input called ``name``, or None."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output called ``name``, or None."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of the input called ``name``, or None."""
    return _by_name(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of the output called ``name``, or None."""
    return _by_name(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether the configuration is that of a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _by_name(tensors: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


# Loading, unloading and querying other models. Loading and unloading require model control mode ``explicit``.


def load_model(model_name: Text, config: Text = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model; return when it is ready. Raises ``TritonModelException`` if the load fails.

    ``config`` is a JSON configuration that replaces the one in the repository; ``files`` are the model's files, with
    keys that consist of ``file:`` and the path in its directory.
    """
    try:
        name = arguments.text("model_name", model_name)
        text = arguments.text("config", config)
        parameters: dict[str, str | bytes] = {"config": text} if text else {}
        parameters |= _contents(name, files)
    except Mismatch as mismatch:
        raise incompatible_call(
            "load_model",
            "(model_name: str, config: str = '', files: object = None) -> None",
            mismatch,
            model_name,
            *([] if isinstance(config, str) and not config else [config]),
        ) from None
    try:
        model_calls.current.load(name, parameters)
    except NeriteError as error:
        raise TritonModelException(f"Failed to load model: {error.message}") from None


def _contents(model_name: str, files: Mapping[str, bytes] | None) -> dict[str, bytes]:
    if files is None:
        return {}
    if not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    for content in files.values():
        if not isinstance(content, bytes):
            raise TypeError(f"Object of type '{type(content).__name__}' is not an instance of 'bytes'")
    return {arguments.text("The path of a file", path): content for path, content in files.items()}


def unload_model(model_name: Text, unload_dependents: bool = False) -> None:
    """Start to unload a model, without waiting for it to drain. Unknown names are ignored.

    Raises ``TritonModelException``.
    """
    try:
        name = arguments.text("model_name", model_name)
        dependents = arguments.flag(unload_dependents)
    except Mismatch as mismatch:
        signature = "(model_name: str, unload_dependents: bool = False) -> None"
        raise incompatible_call("unload_model", signature, mismatch, model_name, unload_dependents) from None
    try:
        model_calls.current.unload(name, dependents=dependents)
    except NeriteError as error:
        raise TritonModelException(f"Failed to unload model: {error.message}") from None


def is_model_ready(model_name: Text, model_version: Text = "") -> bool:
    """Return whether a model is ready. Raises ``TritonModelException`` for an invalid version."""
    try:
        name = arguments.text("model_name", model_name)
        version = arguments.text("model_version", model_version)
    except Mismatch as mismatch:
        signature = "(model_name: str, model_version: str = '') -> bool"
        raise incompatible_call("is_model_ready", signature, mismatch, model_name, model_version) from None
    try:
        return model_calls.current.is_ready(name, version)
    except NeriteError as error:
        raise TritonModelException(f"Failed to ask after model: {error.message}") from None
