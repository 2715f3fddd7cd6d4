"""The classes that the ``model.py`` of a function's model directory asks for. Imported by workers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

from nerite.core.errors import NotFound
from nerite.functions.execution import FunctionModel, model_class_of
from nerite.functions.function_source import FunctionSource
from nerite.functions.program_import import functions_of, import_program

_classes: Final[dict[str, type]] = {}
_numbers: Final = itertools.count(1)


def register(model_class: type) -> str:
    """Offer a class to the models of this process; return its key."""
    key = f"{next(_numbers)}"
    _classes[key] = model_class
    return key


def unregister(key: str) -> None:
    """Withdraw a class."""
    _classes.pop(key, None)


def registered(key: str) -> type[Any]:
    """Return the class of a key. Raises ``NotFound``, in any process but that which has registered it."""
    if key not in _classes:
        raise NotFound(
            "this model is a function of a program that has ended, or of another process: start that program"
        )
    return _classes[key]


def imported(place: str, name: str) -> type[FunctionModel]:
    """Return the class for a function of a file or module."""
    source = FunctionSource(place, name)
    ((_, function),) = functions_of(source, import_program(source))
    return model_class_of(function)


def beside(model_file: str, file: str, name: str) -> type[FunctionModel]:
    """Return the class for a function of a file in the same directory as a ``model.py``."""
    return imported(str(Path(model_file).with_name(file)), name)
