"""C libraries that Python packages bring, opened without the package.

treelite, XGBoost and LightGBM each are a C library with a stable interface, under a Python package that imports scipy,
pandas or scikit-learn: seconds at the first load, and up to 0.2 ms in each prediction. ctypes lets go of the GIL while
a function runs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from nerite.core.tensor import Array

Function = Callable[..., None]
"""A function of a library. Raises ``NativeError``."""

_SUFFIX: Final = ".dylib" if sys.platform == "darwin" else ".so"
_PLACE: Final = re.compile(r"^(\[[\d:]+\] )?\S+\.(cc|cpp|h|hpp|cu):\d+: ")
"""The time and the place in C++ before a message."""


class NativeError(Exception):
    """What a library says went wrong, without its stack trace."""


class Library:
    """A C library whose functions return 0, or leave a message."""

    def __init__(self, path: Path, last_error: str) -> None:
        # A handle of its own: what is declared here of a function does not meet what the package declares.
        self._library = ctypes.CDLL(str(path))
        self._last_error = getattr(self._library, last_error)
        self._last_error.restype = ctypes.c_char_p

    def has(self, name: str) -> bool:
        """Return whether this version of the library has a function."""
        return hasattr(self._library, name)

    def function(self, name: str, *argtypes: Any) -> Function:
        """Return a function that takes arguments of these types. Raises ``NativeError`` if there is no such."""
        try:
            found = self._library[name]  # Another object than the attribute of that name, for other types.
        except AttributeError:
            raise NativeError(f"this version has no function {name}") from None
        found.argtypes = argtypes

        def call(*arguments: Any) -> None:
            if found(*arguments):
                raise NativeError(cleaned(self._last_error() or b""))

        return call


def find(package: str, stem: str) -> Path | None:
    """Return the path of a library that ``package`` brings, or None where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    own = Path(spec.origin).parent
    name = f"{stem}{_SUFFIX}"
    # Wheels have it beside the package's code; conda has it where all libraries are.
    places: Sequence[Path] = (own / "lib", own / "bin", own, Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib")
    return next((place / name for place in places if (place / name).is_file()), None)


@cache
def open_library(path: Path, last_error: str) -> Library:
    """Open a library once. Raises ``OSError`` where the system cannot."""
    return Library(path, last_error)


def release(owner: object, function: Function, handle: ctypes.c_void_p) -> None:
    """Give what ``handle`` stands for back with ``function`` when ``owner`` is gone."""
    # Not at the end of the process, which takes it all, and where other threads may still compute.
    weakref.finalize(owner, function, handle).atexit = False


def cleaned(message: bytes) -> str:
    """Return a message of a library without time, place and stack trace."""
    text = message.decode(errors="replace").partition("Stack trace:")[0].strip()
    return _PLACE.sub("", text) or "no reason given"


# The interface of what computes predictions.

FEW: Final = 8
"""Rows below which one thread computes: to wake others costs more, and on a machine where others work it can cost a
hundred times as much, as OpenMP waits for every thread at the end of every loop."""


class ForestEngine(Protocol):
    """A forest, ready to compute. Instances that compute with as many threads share it, and call it side by side."""

    name: str
    """As the parameter ``engine`` spells it."""
    takes: tuple[np.dtype[Any], ...]
    """The types of rows it takes. Rows of other types are made into the first."""

    def predict(self, rows: Array) -> Array:
        """Return the forest's ``width`` numbers for each row, in memory of their own. Raises ``Internal``.

        ``rows`` are contiguous and aligned, one or more, as wide as the forest has features.
        """


@runtime_checkable
class Explainer(Protocol):
    """An engine that also tells why it predicts what it does."""

    def contributions(self, rows: Array) -> Array:
        """Return, for each row and each number that is predicted, the part of each feature in it, and the bias.

        Raises ``Internal``.
        """


def address(array: Array) -> int:
    """Return where the first element of an array is."""
    return int(array.__array_interface__["data"][0])
