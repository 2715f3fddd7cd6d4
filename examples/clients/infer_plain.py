"""Reads a drawn digit through two models, with nothing but Python's standard library.

python examples/clients/infer_plain.py [examples/clients/pictures/three.txt]

This is all there is to the protocol: a POST with JSON, an answer in JSON. ``infer_http.py`` does the same in binary.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import picture


def infer(url: str, model: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the server's answer, or leave with its error."""
    try:
        with urllib.request.urlopen(f"http://{url}/v2/models/{model}/infer", json.dumps(request).encode()) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refused:
        raise SystemExit(f"{refused.code}: {refused.read().decode()}") from None


def main() -> None:
    """Print the drawing, and what the server thinks it is."""
    options = picture.arguments("read a drawn digit with the standard library", "localhost:8000")
    rows = picture.read(options.picture)
    image = {"name": "image", "datatype": "UINT8", "shape": [1, len(rows), len(rows[0])], "data": rows}
    answer = infer(options.url, "digits_preprocess", {"inputs": [image]})

    # An output of one model has the form of an input of the next.
    [pixels] = answer["outputs"]
    answer = infer(
        options.url,
        "digits",
        {"inputs": [pixels], "outputs": [{"name": "probabilities", "parameters": {"classification": 1}}]},
    )
    [best] = answer["outputs"][0]["data"]
    probability, _, label = best.split(":")
    print(picture.show(rows))
    print(f"This is a {label} ({float(probability):.1%}).")


if __name__ == "__main__":
    main()
