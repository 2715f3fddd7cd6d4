"""What is said of names that there are not."""

from __future__ import annotations

from collections.abc import Iterable

from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument


def refuse_unknown(cache: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``InvalidArgument`` for the first setting that a cache does not have."""
    known = list(known)
    for name in settings:
        if name not in known:
            raise InvalidArgument(f"the cache '{cache}' has no setting '{name}'. It has {choice(name, known)}")


def choice(wrong: str, known: Iterable[str]) -> str:
    """Return the names that there are, and the one that was probably meant."""
    known = list(known)
    near = nearest(wrong, known)
    return ", ".join(f"'{name}'" for name in known) + "." + (f" Did you mean '{near}'?" if near else "")
