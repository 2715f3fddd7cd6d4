"""Loading, unloading and asking after other models from within a model. Not offered yet."""

from __future__ import annotations

from triton_python_backend_utils.errors import not_offered


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model."""
    raise not_offered("load_model()")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model."""
    raise not_offered("unload_model()")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return True if a model can answer."""
    raise not_offered("is_model_ready()")
