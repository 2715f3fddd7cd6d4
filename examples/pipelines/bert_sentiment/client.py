"""Asks what sentiment a few texts have, with NVIDIA's client over HTTP.

pip install 'tritonclient[http]'
python examples/pipelines/bert_sentiment/client.py ["a text of your own" …]
"""

from __future__ import annotations

import argparse

import numpy as np
import tritonclient.http as triton

TEXTS = [
    "The soup was wonderful and our waiter was charming.",
    "The room was not bad at all.",
    "The view was lovely, but the staff was rude and breakfast was cold. Never again!",
    "The plot was anything but boring.",
    "The battery is okay. Nothing special.",
]


def main() -> None:
    """Print each text with its label and how sure the model is."""
    parser = argparse.ArgumentParser(description="say what sentiment texts have")
    parser.add_argument("text", nargs="*", default=TEXTS)
    parser.add_argument("--url", default="localhost:8000", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    client = triton.InferenceServerClient(options.url)
    # One request for each text, all at once: the server makes batches of them, padded no further than needed.
    waiting = [client.async_infer("bert_sentiment", [as_input(text)]) for text in options.text]
    for text, request in zip(options.text, waiting, strict=True):
        answer = request.get_result()
        label = answer.as_numpy("label")[0, 0].decode()
        print(f"{label:10}{answer.as_numpy('probabilities').max():4.0%}  {text}")


def as_input(text: str) -> triton.InferInput:
    """Return a batch of one text."""
    tensor = triton.InferInput("text", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
    return tensor


if __name__ == "__main__":
    main()
