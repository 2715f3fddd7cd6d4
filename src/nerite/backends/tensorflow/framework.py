"""The import of TensorFlow: as little of it, and as quietly, as it lets us."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Final

from nerite.backends import stderr
from nerite.core.errors import NotHere

_log = logging.getLogger("nerite.backends.tensorflow")
# What TensorFlow says of itself is verbose, and the server decides whether it is written.
_log.setLevel(logging.DEBUG)

_GREETING: Final = re.compile(rb"[IW]\d{4} |WARNING: All log messages before|To enable the following instructions")


@cache
def tensorflow(*, alone: bool) -> ModuleType:
    """Return the module. Takes seconds the first time.

    ``alone``: the process is there for TensorFlow. Then it is imported without Keras, which a saved graph does not
    need and which is a third of the time and a quarter of the memory; and what it says is a detail in the log. Raises
    ``Unsupported`` if it is not installed.
    """
    # Below errors, unless whoever started the server wants it otherwise.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        if alone:
            with _without_keras(), stderr.taken(_GREETING, _log), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import tensorflow
        else:
            import tensorflow
    except ImportError as error:
        raise NotHere(f"unable to import tensorflow ({error}): pip install 'nerite[tensorflow]'") from error
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    return tensorflow  # type: ignore[no-any-return]  # The package has no types.


@contextmanager
def _without_keras() -> Iterator[None]:
    """Have ``import keras`` fail, as where it is not installed, which TensorFlow is prepared for."""
    if "keras" in sys.modules:
        yield
        return
    sys.modules["keras"] = None  # type: ignore[assignment]  # That is how one says so.
    try:
        yield
    finally:
        del sys.modules["keras"]
