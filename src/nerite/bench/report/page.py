"""The parts that pages are put together from: one file, which needs nothing else and runs no program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page."""
    style = files(__package__).joinpath("page.css").read_text()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>\n{style}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def opening(title: str, about: Iterable[str], remarks: Iterable[str]) -> list[str]:
    """Return what a page begins with; ``about`` is a line below the title."""
    found = [f"<h1>{escape(title)}</h1>", f"<p>{escape(' · '.join(about))}</p>"]
    return found + [f'<p class="remark">{escape(remark)}</p>' for remark in remarks]


def key(numbers: Iterable[tuple[str, str]]) -> str:
    """Return the numbers that matter most, each with its meaning."""
    shown = (f"<div><b>{escape(value)}</b><span>{escape(meaning)}</span></div>" for value, meaning in numbers)
    return f'<div class="key">{"".join(shown)}</div>'


def plots(figures: Iterable[str]) -> str:
    """Return figures side by side."""
    return f'<div class="plots">{"".join(figures)}</div>'


def figure(title: str, meaning: str, plot: str) -> str:
    """Return a plot with what it shows."""
    return f"<figure><h2>{escape(title)}</h2><p>{escape(meaning)}</p>{plot}</figure>\n"


def difference(text: str) -> str:
    """Return a unified diff, with what comes and what goes in colours."""
    kinds = {"+": "added", "-": "removed", "@": "place"}

    def line(text: str) -> str:
        kind = "place" if text.startswith(("+++", "---")) else kinds.get(text[:1], "")
        return f'<span class="{kind}">{escape(text)}</span>' if kind else escape(text)

    lines = "\n".join(map(line, text.splitlines()))
    return f"<pre>{lines}</pre>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first row is its headings."""
    head, *others = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in others)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>\n{body}</tbody></table></div>'
