"""Draws pictures and asks about them, with NVIDIA's client over gRPC.

pip install 'tritonclient[grpc]'
python examples/pipelines/vision_language/client.py
python examples/pipelines/vision_language/client.py --picture drawing.png "what colour is the circle?"
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from pictures import draw, questions


def main() -> None:
    """Print what is on each picture, and what the server says to questions about it."""
    parser = argparse.ArgumentParser(description="ask about pictures of coloured shapes")
    parser.add_argument("question", nargs="*", help="questions about --picture")
    parser.add_argument("--picture", type=Path, help="a PNG or JPEG; without it three are drawn")
    parser.add_argument("--url", default="localhost:8001", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    client = triton.InferenceServerClient(options.url)
    if options.picture:
        ask(client, options.picture.read_bytes(), options.question or ["how many shapes are there?"])
        return
    chance = random.Random(7)
    for _ in range(3):
        picture = draw(chance)
        print("a picture of", ", ".join(" ".join(pair) for pair in picture.contents))
        ask(client, picture.encoded(), [question for question, _ in questions(picture, chance)])


def ask(client: triton.InferenceServerClient, image: bytes, asked: list[str]) -> None:
    """Send all questions about one image as one batch, and print the answers."""
    inputs = [
        as_input("image", [image] * len(asked)),
        as_input("question", [question.encode() for question in asked]),
    ]
    reply = client.infer("vision_language", inputs)
    for question, answer, confidence in zip(asked, reply.as_numpy("answer"), reply.as_numpy("confidence"), strict=True):
        print(f"    {question:36}{answer[0].decode():10}{confidence[0]:4.0%}")


def as_input(name: str, rows: list[bytes]) -> triton.InferInput:
    """Return a batch of strings, one a row."""
    tensor = triton.InferInput(name, [len(rows), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(rows, dtype=object).reshape(-1, 1))
    return tensor


if __name__ == "__main__":
    main()
