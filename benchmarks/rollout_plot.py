"""A plot of how many equal candidates have been rolled back after how many minutes, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

_WIDTH: Final = 430
_HEIGHT: Final = 260
_LEFT: Final = 56
_GAP: Final = 70
_TOP: Final = 34
_LOOKS: Final = 120
_COLOURS: Final = ("#0b6e4f", "#c2410c", "#2563eb", "#93c5fd", "#ca8a04", "#be185d", "#f472b6")
TITLES: Final = ("A/A, steady", "A/A, load and prompts drift")


def draw(names: Sequence[str], panels: Sequence[np.ndarray]) -> str:
    """Return two panels side by side; each has (rules, runs), the look at which a run was rolled back, 0: never."""
    whole = _LEFT + len(panels) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 50 + 18 * ((len(names) + 1) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{whole}" height="{height}" fill="white"/>',
    ]
    for index, (panel, title) in enumerate(zip(panels, TITLES, strict=True)):
        parts += _panel(panel, title, _LEFT + index * (_WIDTH + _GAP))
    for index, name in enumerate(names):
        x, y = _LEFT + (index % 2) * (_WIDTH + _GAP), _TOP + _HEIGHT + 52 + 18 * (index // 2)
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" {_stroke(index)}/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{name.replace("<", "&lt;")}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _stroke(index: int) -> str:
    return f'stroke="{_COLOURS[index]}" stroke-width="{3 if not index else 1.6}" fill="none"'


def _panel(rolled_back: np.ndarray, title: str, left: int) -> list[str]:
    def x(look: float) -> float:
        return left + look / _LOOKS * _WIDTH

    def y(share: float) -> float:
        return _TOP + (1 - share) * _HEIGHT

    parts = [f'<text x="{left}" y="{_TOP - 12}" font-weight="bold">{title}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line x1="{left}" x2="{x(_LOOKS)}" y1="{y(share)}" y2="{y(share)}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(share) + 4}" text-anchor="end">{share:.0%}</text>')
    for minutes in (0, 12, 24, 36, 48, 60):
        parts.append(f'<text x="{x(minutes * 2)}" y="{y(0) + 16}" text-anchor="middle">{minutes} min</text>')
    parts.append(
        f'<line x1="{left}" x2="{x(_LOOKS)}" y1="{y(0.05)}" y2="{y(0.05)}" stroke="#555" stroke-dasharray="4 3"/>'
    )
    parts.append(f'<text x="{x(_LOOKS)}" y="{y(0.05) - 4}" text-anchor="end" fill="#555">5 % asked for</text>')
    for index in reversed(range(len(rolled_back))):
        hits = np.bincount(rolled_back[index], minlength=_LOOKS + 1)[1 : _LOOKS + 1].cumsum() / rolled_back.shape[1]
        points = " ".join(f"{x(look):.1f},{y(share):.1f}" for look, share in enumerate([0.0, *hits]))
        parts.append(f'<polyline points="{points}" {_stroke(index)}/>')
    return parts
