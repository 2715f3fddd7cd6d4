"""C libraries that come with Python packages, opened without importing the packages.

treelite, XGBoost and LightGBM each are a C library with a stable interface below a Python package that imports scipy,
pandas or scikit-learn: seconds at the first load, and up to 0.2 ms in each prediction. ctypes releases the GIL while a
function runs.
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
from typing import Any, Final

from nerite.core.tensor import Array

Function = Callable[..., None]
"""A function of a library. Raises ``NativeError``."""

_SUFFIX: Final = ".dylib" if sys.platform == "darwin" else ".so"
_PLACE: Final = re.compile(r"^(\[[\d:]+\] )?\S+\.(cc|cpp|h|hpp|cu):\d+: ")
"""The time and the place in C++ before a message."""


class NativeError(Exception):
    """An error reported by a library, without its stack trace."""


class MissingLibrary(Exception):
    """The package of a library is not installed."""


class Library:
    """A C library whose functions return 0, or store an error message."""

    def __init__(self, path: Path, last_error: str) -> None:
        # A handle of its own, so that types declared here do not affect those that the package declares.
        self._library = ctypes.CDLL(str(path))
        self._last_error = getattr(self._library, last_error)
        self._last_error.restype = ctypes.c_char_p

    def has(self, name: str) -> bool:
        """Return whether this version of the library has a function."""
        return hasattr(self._library, name)

    def function(self, name: str, *argtypes: Any) -> Function:
        """Return a function. Raises ``NativeError`` if the library does not have it.

        Without ``argtypes`` its arguments must be ctypes values, references to them, bytes or None.
        """
        try:
            found = self._library[name]  # another object than the attribute of that name, with its own types
        except AttributeError:
            raise NativeError(f"this version has no function {name}") from None
        if argtypes:
            found.argtypes = argtypes

        def call(*arguments: Any) -> None:
            if found(*arguments):
                raise NativeError(cleaned(self._last_error() or b""))

        return call

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function once. Raises ``NativeError``."""
        self.function(name)(*arguments)


def library(package: str, stem: str, last_error: str) -> Library:
    """Return the library ``stem`` of a package. Raises ``MissingLibrary``, or ``OSError`` if it cannot be opened."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingLibrary(f"{package} is not installed")
    own = Path(spec.origin).parent
    name = f"{stem}{_SUFFIX}"
    # Wheels have it next to the package's code; conda has it where all libraries are.
    places: Sequence[Path] = (own / "lib", own / "bin", own, Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib")
    for place in places:
        if (place / name).is_file():
            return _opened(place / name, last_error)
    raise MissingLibrary(f"the package '{package}' has no library")


@cache
def _opened(path: Path, last_error: str) -> Library:
    return Library(path, last_error)


def release(owner: object, function: Function, handle: ctypes.c_void_p) -> None:
    """Call ``function`` with ``handle`` when ``owner`` is garbage-collected."""
    # Not at the end of the process, which frees everything, and where other threads may still compute.
    weakref.finalize(owner, function, handle).atexit = False


def cleaned(message: bytes) -> str:
    """Return a library's message without time, place and stack trace."""
    text = message.decode(errors="replace").partition("Stack trace:")[0].strip()
    return _PLACE.sub("", text) or "no reason given"


def address(array: Array) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])
