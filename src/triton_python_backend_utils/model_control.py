"""Loading, unloading and asking after other models from within a model. The server must be in explicit mode to load."""

from __future__ import annotations

from collections.abc import Mapping

from nerite.core import host
from nerite.core.errors import NeriteError
from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import Mismatch, Text
from triton_python_backend_utils.errors import TritonModelException, incompatible_call


def load_model(model_name: Text, config: Text = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model, and return when it is ready. Raises ``TritonModelException`` with the reason if not.

    ``config`` is a configuration as JSON in place of the one of the repository; ``files`` are the model's files, by
    ``file:`` and their path in its directory.
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
        host.current.load(name, parameters)
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
    """Have a model unloaded; it may go on for a while. Raises ``TritonModelException``; an unknown name is fine."""
    try:
        name = arguments.text("model_name", model_name)
        dependents = arguments.flag(unload_dependents)
    except Mismatch as mismatch:
        signature = "(model_name: str, unload_dependents: bool = False) -> None"
        raise incompatible_call("unload_model", signature, mismatch, model_name, unload_dependents) from None
    try:
        host.current.unload(name, dependents=dependents)
    except NeriteError as error:
        raise TritonModelException(f"Failed to unload model: {error.message}") from None


def is_model_ready(model_name: Text, model_version: Text = "") -> bool:
    """Return True if a model can answer. Raises ``TritonModelException`` for a version that is none."""
    try:
        name = arguments.text("model_name", model_name)
        version = arguments.text("model_version", model_version)
    except Mismatch as mismatch:
        signature = "(model_name: str, model_version: str = '') -> bool"
        raise incompatible_call("is_model_ready", signature, mismatch, model_name, model_version) from None
    try:
        return host.current.is_ready(name, version)
    except NeriteError as error:
        raise TritonModelException(f"Failed to ask after model: {error.message}") from None
