"""Finds the passage of the documentation that has most to do with a question."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LEFT_OUT = re.compile("benchmarks|contract|diff|tour|architecture|dependencies|comparison|coming-from|doctor|playbooks")
"""Pages that are about something else, or name everything."""
STOP = frozenset(
    {
        *("a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "does", "for", "from", "get", "give", "has"),
        *("have", "how", "i", "if", "in", "is", "it", "its", "me", "my", "of", "on", "one", "or", "own", "so", "that"),
        *("the", "there", "this", "to", "turn", "use", "what", "when", "where", "which", "who", "will", "with"),
    }
)
SATURATION, LENGTH = 1.2, 0.5
"""Of BM25: how much repetition counts, and how much long passages are held back."""


COMMAND = 1.2
"""What a command is worth."""


class Passage(NamedTuple):
    """A paragraph, with the command that follows it if there is one, or the row of a table."""

    page: str
    heading: str
    text: str


def passages(folder: Path) -> Iterator[Passage]:
    """Give the passages of all pages in a folder."""
    for file in sorted(folder.glob("*.md")):
        if LEFT_OUT.match(file.stem):
            continue
        heading, before = file.stem, ""
        for block in re.split(r"\n{2,}(?![^`]*\n```$)", without_blank_lines_in_code(file.read_text())):
            block = block.strip()
            if block.startswith("#"):
                heading, before = block.lstrip("# "), ""
            elif block.startswith("|"):
                for row in block.splitlines()[2:]:
                    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
                    yield Passage(file.name, heading, plain(": ".join(filter(None, cells))))
                before = ""
            elif block.startswith("```"):
                yield Passage(file.name, heading, f"{before}\n\n{block}".replace("\0", "\n").strip())
                before = ""
            else:
                if before:
                    yield Passage(file.name, heading, before)
                before = plain(block)
        if before:
            yield Passage(file.name, heading, before)


def without_blank_lines_in_code(text: str) -> str:
    """Return a text whose code blocks are each one paragraph: blank lines in them become zero bytes."""
    return re.sub(r"^```.*?^```", lambda code: code[0].replace("\n\n", "\n\0"), text, flags=re.MULTILINE | re.DOTALL)


def plain(text: str) -> str:
    """Return a paragraph in one line, without the addresses of its links."""
    return html.unescape(" ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).split())).replace("\\|", "|")


def words(text: str) -> list[str]:
    """Return the words of a text without their endings; the parts of a flag or a path are words."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    return [re.sub(r"(ing|ed|es|s|e)$", "", word) or word for word in found if word not in STOP]


class Finder:
    """Ranks passages by BM25. A heading counts as if it stood in each of its passages."""

    def __init__(self, found: list[Passage]) -> None:
        self.passages = found
        self._counts = [
            Counter(words(f"{each.heading} {each.heading} {Path(each.page).stem} {each.text}")) for each in found
        ]
        self._lengths = [sum(count.values()) for count in self._counts]
        self._mean = sum(self._lengths) / max(len(found), 1)
        rare = Counter(word for count in self._counts for word in count)
        self._weights = {word: math.log(1 + len(found) / (number + 0.5)) for word, number in rare.items()}

    def best(self, question: str) -> Passage | None:
        """Return the passage that fits a question best; None if no word of it is known."""
        asked = set(words(question))
        scores = [self._score(asked, number) for number in range(len(self.passages))]
        best = max(range(len(scores)), key=scores.__getitem__, default=None)
        return None if best is None or not scores[best] else self.passages[best]

    def _score(self, asked: set[str], number: int) -> float:
        counts = self._counts[number]
        held_back = SATURATION * (1 - LENGTH + LENGTH * self._lengths[number] / self._mean)
        found = sum(
            self._weights[word] * counts[word] * (SATURATION + 1) / (counts[word] + held_back)
            for word in asked
            if word in counts
        )
        return found * COMMAND if "```" in self.passages[number].text else found
