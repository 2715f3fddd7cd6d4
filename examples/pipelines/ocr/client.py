"""Has pages read that it has drawn, with NVIDIA's client over HTTP.

pip install 'tritonclient[http]' pillow
python examples/pipelines/ocr/client.py [picture …]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import numpy as np
import tritonclient.http as triton
from drawing import drawn_page, random_word


def main() -> None:
    """Print the words of each page, and for drawn ones how many are right."""
    parser = argparse.ArgumentParser(description="read the words on pages")
    parser.add_argument("picture", nargs="*", type=Path, help="PNG or JPEG; without any, pages are drawn")
    parser.add_argument("--url", default="localhost:8000", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    client = triton.InferenceServerClient(options.url)
    for picture in options.picture:
        words, _ = read(client, picture.read_bytes())
        print(f"{picture}: {' '.join(words)}")
    if options.picture:
        return
    chance = Random(7)
    right = total = 0
    for number in range(20):
        expected = [random_word(chance) for _ in range(5)]
        words, boxes = read(client, drawn_page(expected, chance))
        right += sum(word == other for word, other in zip(words, expected, strict=False))
        total += len(expected)
        if not number:
            for word, box in zip(words, boxes, strict=True):
                print(f"{word:10} at {box[0]:3}, {box[1]:3}")
    print(f"{right / total:.0%} of {total} words on 20 pages are read right")


def read(client: triton.InferenceServerClient, picture: bytes) -> tuple[list[str], list[list[int]]]:
    """Return the words of a page and their boxes."""
    page = triton.InferInput("page", [1], "BYTES")
    page.set_data_from_numpy(np.array([picture], dtype=object))
    answer = client.infer("ocr", [page])
    return [word.decode() for word in answer.as_numpy("words")], answer.as_numpy("boxes").tolist()


if __name__ == "__main__":
    main()
