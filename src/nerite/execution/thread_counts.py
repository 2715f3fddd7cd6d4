"""How many threads the libraries in a worker start: as many as it has cores for itself.

Each library starts a thread for every core, so that several workers get into each other's way: two that multiply
matrices on two cores do a third more with one thread each. For workers, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from nerite.backends.cores import share
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import InvalidArgument

PARAMETER: Final = "INTRA_OP_THREAD_COUNT"
"""Of a model that knows better; 0 leaves it to the libraries."""
_GENERAL: Final = "OMP_NUM_THREADS"
_OPENBLAS: Final = "OPENBLAS_NUM_THREADS"
_VARIABLES: Final = (_GENERAL, _OPENBLAS, "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What libraries read when they are loaded: the first of them PyTorch and many others."""
_SETTERS: Final = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)
"""What its builds call one function. Those that end in ``_`` or ``_64_`` are for Fortran, and take a pointer."""


def thread_variables(context: ModelContext, instance: InstanceContext, ours: Mapping[str, str]) -> dict[str, str]:
    """Return what the environment of a worker should say. ``ours``, the server's own environment, has precedence.

    Raises ``InvalidArgument`` for a parameter of the model that is no number.
    """
    told = context.parameter(PARAMETER)
    if told:
        if not told.isdecimal():
            raise InvalidArgument(
                f"parameter '{PARAMETER}' of model '{context.name}' is '{told}'; it may be a number of threads, "
                "or 0 to leave it to the libraries"
            )
        return dict.fromkeys(_VARIABLES, told) if int(told) else {}
    if _GENERAL in ours:
        return {}
    return {name: str(share(instance)) for name in _VARIABLES if name not in ours}


def follow(environment: Mapping[str, str], maps: Path = Path("/proc/self/maps")) -> None:
    """Have OpenBLAS do what ``environment`` says: with numpy, it was loaded before that was known."""
    count = environment.get(_OPENBLAS)
    if count is None:
        return
    with suppress(OSError):  # not on Linux
        for path in {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "openblas" in line}:
            library = ctypes.CDLL(path)
            for setter in _SETTERS:
                if hasattr(library, setter):
                    library[setter](int(count))
