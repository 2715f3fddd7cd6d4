"""One flag of the command line: a row of the table in ``flags``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from nerite.cli.kinds import Kind
from nerite.config.options import ServerOptions

_DEFAULTS = ServerOptions()


@dataclass(frozen=True)
class Flag:
    """Name, type, meaning and destination of a flag."""

    name: str
    """Without the dashes."""
    group: str
    kind: Kind
    help: str
    field: str = ""
    """Where the value goes in ``ServerOptions``, dotted; empty where ``assembly`` works it out."""
    join: Callable[[Any, Any], Any] | None = None
    """Joins what a repeated flag brought so far with what it brings now. None: the last one wins."""
    accepted: str = ""
    """Why the flag has no effect in this version; empty for a flag that works. Its values are checked all the same."""
    stands_for: str = ""
    """The flag that this one is another name of."""
    deprecated: str = ""
    """Triton's warning whenever the flag is used; ``{value}`` is its value."""
    default_text: str = ""
    """The default in words, where the value in ``ServerOptions`` does not say it well."""

    @property
    def key(self) -> str:
        """The name under which the value is kept."""
        return self.stands_for or self.name

    @property
    def environment(self) -> str:
        """The environment variable that sets this flag."""
        return "NERITE_" + self.name.upper().replace("-", "_")

    @property
    def ours(self) -> bool:
        """Triton has no such flag."""
        return self.group == "Nerite"

    @property
    def default(self) -> str:
        """The default as help shows it."""
        if self.default_text or not self.field:
            return self.default_text
        value = at(_DEFAULTS, self.field)
        if isinstance(value, bool):
            return str(value).lower()
        return "" if value is None or value in ((), {}) else str(value)


def at(options: object, path: str) -> Any:
    """Return the value at a dotted path of ``ServerOptions``."""
    return reduce(getattr, path.split("."), options)
