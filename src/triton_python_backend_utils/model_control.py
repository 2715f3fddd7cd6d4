"""Loading, unloading and asking after other models from within a model. The server must be in explicit mode to load."""

from __future__ import annotations

from nerite.core import host
from nerite.core.errors import NeriteError
from triton_python_backend_utils.errors import TritonModelException, incompatible_call


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load or reload a model, and return when it is ready. Raises ``TritonModelException`` with the reason if not.

    ``config`` is a configuration as JSON in place of the one of the repository; ``files`` are the model's files, by
    ``file:`` and their path in its directory.
    """
    if not isinstance(model_name, str) or not isinstance(config, str):
        raise incompatible_call(
            "load_model",
            "(model_name: str, config: str = '', files: object = None) -> None",
            model_name,
            *(() if config == "" else (config,)),
        )
    parameters: dict[str, str | bytes] = {"config": config} if config else {}
    for name, content in (files or {}).items():
        if not isinstance(content, bytes):
            raise TypeError(f"Object of type '{type(content).__name__}' is not an instance of 'bytes'")
        parameters[name] = content
    try:
        host.current.load(model_name, parameters)
    except NeriteError as error:
        raise TritonModelException(f"Failed to load model: {error.message}") from None


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Have a model unloaded; it may go on for a while. Raises ``TritonModelException``; an unknown name is fine."""
    try:
        host.current.unload(model_name, dependents=unload_dependents)
    except NeriteError as error:
        raise TritonModelException(f"Failed to unload model: {error.message}") from None


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return True if a model can answer. Raises ``TritonModelException`` for a version that is none."""
    try:
        return host.current.is_ready(model_name, model_version)
    except NeriteError as error:
        raise TritonModelException(f"Failed to ask after model: {error.message}") from None
