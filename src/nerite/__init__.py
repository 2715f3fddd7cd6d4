"""Nerite: an inference server in Python, compatible with NVIDIA Triton.

Importing this package must stay cheap: worker processes and foreign Python environments import it, too. So the names
for functions as models (docs/functions.md) are imported when they are first used. Their types: ``__init__.pyi``.
"""

from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "model": "model_function",
    "ModelFunction": "model_function",
    "serve": "serving",
    "Server": "server",
    "InProcessModel": "server",
    "SequenceState": "annotations",
    "FunctionMistake": "annotations",
    "BadRequest": "values",
}
_ARRAYS = frozenset(
    "Bool Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Float16 Float32 Float64 Bytes Text".split()  # noqa: SIM905
)

__all__ = [*_PLACES, *sorted(_ARRAYS), "__version__"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _ARRAYS:
        found = import_module("nerite.functions.annotations").ARRAYS[name]
    elif name in _PLACES:
        found = getattr(import_module(f"nerite.functions.{_PLACES[name]}"), name)
    else:
        raise AttributeError(f"module 'nerite' has no attribute '{name}'")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
