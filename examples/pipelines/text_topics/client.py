"""Asks what texts are about, with NVIDIA's client over HTTP.

pip install 'tritonclient[http]'
python examples/pipelines/text_topics/client.py ["a text of your own" …]
"""

from __future__ import annotations

import argparse

import numpy as np
import tritonclient.http as triton

TEXTS = [
    "Hello, my parcel was left in the rain again.",
    "The app crashes since the weekend. This is the second time.",
    "I was charged twice for the same subscription!",
    "teh webiste does not laod",
]


def main() -> None:
    """Print the topic of each text, and how sure the model is."""
    parser = argparse.ArgumentParser(description="say what texts are about")
    parser.add_argument("text", nargs="*", default=TEXTS)
    parser.add_argument("--url", default="localhost:8000", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    rows = np.array([[text.encode()] for text in options.text], dtype=object)
    texts = triton.InferInput("text", rows.shape, "BYTES")
    texts.set_data_from_numpy(rows)
    answer = triton.InferenceServerClient(options.url).infer("topics", [texts])
    for text, topic, chances in zip(
        options.text, answer.as_numpy("topic")[:, 0], answer.as_numpy("probabilities"), strict=True
    ):
        print(f"{topic.decode():10}{chances.max():4.0%}  {text}")


if __name__ == "__main__":
    main()
