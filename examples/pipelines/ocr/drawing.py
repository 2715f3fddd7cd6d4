"""Pages with words on them, drawn at random: what the recognition is trained on, and what the client has read."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ALPHABET = (Path(__file__).parent / "models" / "ocr" / "alphabet.txt").read_text().strip()
"""Without 0 and 1, which look like letters."""
WIDTH, HEIGHT = 480, 320
SPACING = 2
"""Pixels between two letters."""


def drawn_letter(letter: str, size: int) -> np.ndarray:
    """Return a letter as a matrix: 1 for ink, 0 for paper."""
    font = ImageFont.load_default(size)
    left, top, right, bottom = map(int, font.getbbox(letter))
    picture = Image.new("L", (right - left + 2, bottom - top + 2), 0)
    ImageDraw.Draw(picture).text((1 - left, 1 - top), letter, 255, font)
    return np.asarray(picture, np.float32) / 255


def drawn_page(words: list[str], chance: Random) -> bytes:
    """Return a PNG of a grey page with these words, each somewhere on a line of its own."""
    paper = np.zeros((HEIGHT, WIDTH), np.float32)
    room = HEIGHT // max(len(words), 1)
    for number, word in enumerate(words):
        letters = [drawn_letter(letter, chance.randint(20, 26)) for letter in word]
        width = sum(letter.shape[1] + SPACING for letter in letters)
        left = chance.randrange(8, max(WIDTH - width - 8, 9))
        base = number * room + room - 12
        for letter in letters:
            paper[base - letter.shape[0] : base, left : left + letter.shape[1]] += letter
            left += letter.shape[1] + SPACING
    noise = np.random.default_rng(chance.randrange(1 << 32)).normal(0, 6, paper.shape)
    grey = np.clip(235 - 200 * np.clip(paper, 0, 1) + noise, 0, 255)
    file = io.BytesIO()
    Image.fromarray(grey.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def random_word(chance: Random) -> str:
    """Return a word that no dictionary has."""
    return "".join(chance.choice(ALPHABET) for _ in range(chance.randint(3, 8)))
