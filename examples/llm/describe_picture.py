"""Draws a picture, or takes yours, and has it described: an image in a chat, with OpenAI's client.

pip install openai pillow
python examples/llm/describe_picture.py [drawing.png]
"""

from __future__ import annotations

import argparse
import base64
import io
from pathlib import Path

import openai
from PIL import Image, ImageDraw

RED, GREEN, BLUE, YELLOW = (210, 40, 40), (40, 160, 60), (40, 70, 200), (235, 200, 40)


def main() -> None:
    """Print what the server sees, as it is written."""
    parser = argparse.ArgumentParser(description="have a picture of coloured shapes described")
    parser.add_argument("picture", nargs="?", type=Path, help="a PNG or JPEG; without it one is drawn")
    parser.add_argument("--url", default="localhost:8000", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    image = options.picture.read_bytes() if options.picture else drawn()
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    content = [
        {"type": "text", "text": "What is on the picture?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    client = openai.OpenAI(base_url=f"http://{options.url}/v1", api_key="any")
    messages = [{"role": "user", "content": content}]
    for chunk in client.chat.completions.create(model="describe", messages=messages, stream=True, temperature=0):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def drawn() -> bytes:
    """Return a picture with a circle, a square and a triangle as a PNG."""
    picture = Image.new("RGB", (192, 192), "white")
    pen = ImageDraw.Draw(picture)
    pen.ellipse((10, 10, 58, 58), fill=RED)
    pen.rectangle((134, 70, 182, 118), fill=BLUE)
    pen.polygon(((72, 182), (96, 134), (120, 182)), fill=GREEN)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    main()
