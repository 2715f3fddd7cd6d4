"""The GPUs that the instances of a model may be on."""

from __future__ import annotations

from typing import Final, NamedTuple


class Gpus(NamedTuple):
    """GPUs by their numbers, as instance groups name them."""

    numbers: tuple[int, ...] = ()
    minimum: float = 6.0
    """The compute capability that each of them has at least."""
    preferred: bool = True
    """Whether ``KIND_AUTO`` means them. It does not where the framework that is installed can use CPUs alone."""


NO_GPUS: Final = Gpus()
