"""Durations as people write them: ``90s``, ``5m``, ``1h30m``, ``2d``.

Used by configuration files and command lines. A number alone is in seconds.
"""

from __future__ import annotations

import re
from typing import Final

_LONGEST: Final = 366 * 86400.0
"""Seconds of the longest duration."""
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")


def duration_of(text: object) -> float:
    """Return seconds: of a number, or of ``90s``, ``5m``, ``1h30m``, ``2d``. Raises ``ValueError``."""
    seconds: float
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = text
    elif isinstance(text, str) and _DURATION.fullmatch(text):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    elif isinstance(text, str) and re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(text)
    else:
        raise ValueError("must be a duration, as in 30s, 5m or 1h30m")
    if not 0 <= seconds <= _LONGEST:
        raise ValueError("must be from 0 to 366 days")
    return float(seconds)


def duration_text(seconds: float) -> str:
    """Return seconds as text that ``duration_of`` reads: ``1h30m``."""
    whole = int(seconds)
    text = ""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        count, whole = divmod(whole, size)
        text += f"{count}{unit}" if count else ""
    rest = whole + round(seconds - int(seconds), 3)
    return text + (f"{rest:g}s" if rest or not text else "")
