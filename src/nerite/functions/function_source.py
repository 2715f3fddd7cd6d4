"""Where a function is defined, as in ``nerite serve FILE.py:NAME``, and the files that it needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from nerite.core.errors import InvalidArgument

_MAX_COPIED: Final = 200
"""Files that a model directory takes along."""


class FunctionSource(NamedTuple):
    """Where a function is defined."""

    place: str
    """Path of a file, or name of a module."""
    name: str
    """Variable of the function; empty for all functions of the program."""

    @property
    def is_file(self) -> bool:
        """The place is a file, and not a module on Python's path."""
        return self.place.endswith(".py")

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.place).absolute()

    def __str__(self) -> str:
        return f"{self.place}:{self.name}" if self.name else self.place

    @classmethod
    def parse(cls, text: str) -> FunctionSource | None:
        """Read ``FILE.py``, ``FILE.py:NAME`` or ``MODULE:NAME``; return None for anything else."""
        place, colon, name = text.rpartition(":") if ":" in text else (text, "", "")
        if place.endswith(".py") and (not colon or name.isidentifier()) and not Path(text).is_dir():
            return cls(place, name)
        is_module = all(part.isidentifier() for part in place.split("."))
        return cls(place, name) if colon and is_module and name.isidentifier() else None


def files_beside(file: Path) -> list[Path]:
    """Return a program and the files in its directory that it imports, and that these import.

    Raises ``InvalidArgument`` if there are too many.
    """
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        if len(found) > _MAX_COPIED:
            raise InvalidArgument(f"{file} imports more than {_MAX_COPIED} files of its directory: make it a package")
        for name in _imported(path):
            for candidate in (file.parent / f"{name}.py", file.parent / name / "__init__.py"):
                if candidate.is_file():
                    waiting += (
                        [candidate] if candidate.name != "__init__.py" else sorted(candidate.parent.rglob("*.py"))
                    )
                    break
    return list(found)


def _imported(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
