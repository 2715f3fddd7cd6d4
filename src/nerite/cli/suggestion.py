"""Did you mean: the sentence that goes with a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable

from nerite.config.near import nearest


def did_you_mean(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``Did you mean '…'?``, or an empty string where nothing is near."""
    name = nearest(wrong, known)
    return f"Did you mean '{prefix}{name}'?" if name else ""
