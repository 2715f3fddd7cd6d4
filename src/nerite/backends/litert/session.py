"""Interpreters of LiteRT: the import of the framework, the opening of a model, the meaning of its errors."""

from __future__ import annotations

import logging
import re
import threading
from functools import cache
from pathlib import Path
from typing import Any, Final

from nerite.backends import stderr
from nerite.backends.litert.plan import InterpreterPlan
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotHere, Unsupported

_log = logging.getLogger("nerite.backends.litert")

_GREETING: Final = re.compile(rb"INFO: Created TensorFlow Lite XNNPACK delegate")
_greeted: Final = threading.Event()
"""LiteRT says this once, with the first model that XNNPACK can do something for."""
_FLEX: Final = "Select TensorFlow op"
_DAMAGED: Final = "not a valid Flatbuffer"
_MARK: Final = b"TFL3"
"""The bytes 4 to 8 of every model."""


def open_interpreter(plan: InterpreterPlan) -> Any:
    """Return an ``Interpreter`` that is ready to run. Raises ``NeriteError`` with what is wrong with the model."""
    make = _interpreter()
    with plan.path.open("rb") as file:
        if file.read(8)[4:] != _MARK:
            raise InvalidArgument(f"'{plan.path}' is not a model for LiteRT: {_what_it_may_be(plan.path)}")
    try:
        if _greeted.is_set():
            return _opened(make, plan)
        with stderr.taken(_GREETING, _log) as greeting:
            interpreter = _opened(make, plan)
    except Exception as error:  # Whatever the framework raises says why the model cannot be opened.
        raise _refused(error, plan.path) from error
    if greeting:
        _greeted.set()
    return interpreter


def _opened(make: Any, plan: InterpreterPlan) -> Any:
    interpreter = make(model_path=str(plan.path), num_threads=plan.threads)
    interpreter.allocate_tensors()
    return interpreter


def translated(error: Exception) -> NeriteError:
    """Return what a client and the log are told of an exception from LiteRT."""
    return error if isinstance(error, NeriteError) else Internal(f"LiteRT error: {error}")


@cache
def _interpreter() -> Any:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise NotHere(f"unable to import ai_edge_litert ({error}): pip install 'nerite[litert]'") from error
    return Interpreter


def _what_it_may_be(path: Path) -> str:
    size = path.stat().st_size
    return f"it has {size} bytes. Was it copied whole, and made by a TFLiteConverter?"


def _refused(error: Exception, path: Path) -> NeriteError:
    text = str(error).rstrip(".")
    if _FLEX in text:
        return Unsupported(
            f"unable to load '{path}': {text}. It was converted with SELECT_TF_OPS, and LiteRT does not have "
            "TensorFlow's operators. Convert it without them, or serve the SavedModel with the backend tensorflow"
        )
    remedy = ". The file is cut off or damaged: copy it again" if _DAMAGED in text else ""
    return Internal(f"unable to load '{path}': {text}{remedy}")
