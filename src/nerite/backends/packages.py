"""Backends from Python packages: any package may offer some, as entry points of the group ``nerite.backends``.

An entry point leads to a class like ``Backend`` of ``interface.py``. Reading what is installed takes a moment, so it is
done only for names that nobody else knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from nerite.backends.interface import INTERFACE, Backend
from nerite.core.errors import NotHere, Unsupported

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "nerite.backends"


def names() -> list[str]:
    """Return the backends that installed packages offer."""
    return [point.name for point in _points()]


def backend(name: str) -> Backend | None:
    """Make the backend ``name``; return None where no package offers it. Imports the package's module.

    Raises ``Unsupported`` where two packages offer it, it cannot be imported, or is for another interface.
    """
    points = _points(name)
    if not points:
        return None
    if len(points) > 1:
        packages = " and ".join(map(_package, points))
        raise Unsupported(f"backend '{name}' is offered by the packages {packages}: uninstall all but one of them")
    (point,) = points
    offered = f"backend '{name}' of the package {_package(point)}"
    try:
        found = point.load()()
    except Exception as error:  # whatever its module raises is what is wrong with it
        raise NotHere(f"{offered} cannot be imported: {type(error).__name__}: {error}") from error
    written_for = getattr(found, "interface", None)
    if written_for != INTERFACE:
        raise Unsupported(
            f"{offered} is written for version {written_for} of the interface of backends; this Nerite has version "
            f"{INTERFACE}. Install a version of the package for it"
        )
    return cast(Backend, found)


def _points(name: str | None = None) -> list[EntryPoint]:
    from importlib.metadata import entry_points  # takes longer than all the rest that a worker imports

    return list(entry_points(group=GROUP) if name is None else entry_points(group=GROUP, name=name))


def _package(point: EntryPoint) -> str:
    return "?" if point.dist is None else f"{point.dist.name} {point.dist.version}"
