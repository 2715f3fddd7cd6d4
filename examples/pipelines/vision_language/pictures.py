"""Pictures of coloured shapes, and questions about them with their answers: what the pipeline learns from."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLOURS = {"red": (214, 48, 49), "green": (39, 160, 75), "blue": (45, 98, 200), "yellow": (240, 196, 25)}
SHAPES = ("circle", "square", "triangle")
SIDE = 192
CELL = SIDE // 3


@dataclass
class Picture:
    """What is on a picture, as pairs of colour and shape, and the picture itself."""

    contents: list[tuple[str, str]]
    image: Image.Image

    def encoded(self, form: str = "PNG") -> bytes:
        """Return the bytes of an image file."""
        buffer = io.BytesIO()
        self.image.save(buffer, form)
        return buffer.getvalue()


def draw(chance: random.Random) -> Picture:
    """Return a picture of one to five shapes, which do not touch."""
    paper = tuple(chance.randrange(225, 256) for _ in range(3))
    image = Image.new("RGB", (SIDE, SIDE), paper)
    canvas = ImageDraw.Draw(image)
    contents = []
    for cell in chance.sample(range(9), chance.randint(1, 5)):
        colour, shape = chance.choice(list(COLOURS)), chance.choice(SHAPES)
        size = chance.randint(28, CELL - 10)
        x = cell % 3 * CELL + chance.randint(4, CELL - size - 4)
        y = cell // 3 * CELL + chance.randint(4, CELL - size - 4)
        ink = tuple(min(255, max(0, part + chance.randint(-20, 20))) for part in COLOURS[colour])
        if shape == "circle":
            canvas.ellipse((x, y, x + size, y + size), ink)
        elif shape == "square":
            canvas.rectangle((x, y, x + size, y + size), ink)
        else:
            canvas.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], ink)
        contents.append((colour, shape))
    return Picture(contents, image)


def questions(picture: Picture, chance: random.Random) -> list[tuple[str, str]]:
    """Return one question of each kind that the picture answers, with the answer."""
    colours = [colour for colour, _ in picture.contents]
    shapes = [shape for _, shape in picture.contents]
    counted = chance.choice(SHAPES)
    # Half of the time something that is there, half of the time anything.
    sought = chance.choice((chance.choice(picture.contents), (chance.choice(list(COLOURS)), counted)))
    asked = [
        ("how many shapes are there?", str(len(shapes))),
        (f"how many {counted}s are there?", str(shapes.count(counted))),
        (f"is there a {' '.join(sought)}?", "yes" if sought in picture.contents else "no"),
    ]
    colour, shape = chance.choice(picture.contents)
    if shapes.count(shape) == 1:
        asked.append((f"what colour is the {shape}?", colour))
    if colours.count(colour) == 1:
        asked.append((f"what shape is {colour}?", shape))
    return asked
