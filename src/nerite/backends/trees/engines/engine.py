"""The interface of what computes predictions."""

from __future__ import annotations

from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from nerite.core.tensor import Array

FEW: Final = 8
"""Rows below which one thread computes: to wake others costs more, and on a machine where others work it can cost a
hundred times as much, as OpenMP waits for every thread at the end of every loop."""


class Engine(Protocol):
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
