"""A plugin, ``plugins = nerite.functions.mypy_plugin``, so that mypy reads ``Float32["n"]`` as an array of numpy.

Without it, mypy takes the name of a dimension for the name of a type. The element type is that of the kind: mypy knows
a ``Float32`` from an ``Int64``, but not from a ``Float64``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from mypy.plugin import AnalyzeTypeContext, Plugin
from mypy.types import AnyType, Type, TypeOfAny

_PREFIX: Final = "nerite."
_KINDS: Final = {"Int": "numpy.signedinteger", "UInt": "numpy.unsignedinteger", "Float": "numpy.floating"}
_OBJECTS: Final = ("Bytes", "Text")


class ArrayPlugin(Plugin):
    """Reads the annotations of arrays, and leaves their dimensions to ``@nerite.model``."""

    def get_type_analyze_hook(self, fullname: str) -> Callable[[AnalyzeTypeContext], Type] | None:
        """Return what reads an annotation of this package; None for all others."""
        name = fullname.removeprefix(_PREFIX)
        if name == fullname or not (name == "Bool" or name in _OBJECTS or name.rstrip("0123456789") in _KINDS):
            return None
        return partial(_array, name)


def _array(name: str, context: AnalyzeTypeContext) -> Type:
    """Return the type of an array."""
    anything = AnyType(TypeOfAny.explicit)
    element: Type = anything
    if name in _OBJECTS:
        element = context.api.named_type("numpy.object_", [])
    elif name != "Bool":
        element = context.api.named_type(_KINDS[name.rstrip("0123456789")], [anything])
    return context.api.named_type("numpy.ndarray", [anything, context.api.named_type("numpy.dtype", [element])])


def plugin(_version: str) -> type[Plugin]:
    """Return the plugin, for any version of mypy."""
    return ArrayPlugin
