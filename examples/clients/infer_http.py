"""Reads a drawn digit through two models, with NVIDIA's client over HTTP.

pip install 'tritonclient[http]'
python examples/clients/infer_http.py [examples/clients/pictures/three.txt]
"""

from __future__ import annotations

import numpy as np
import picture
import tritonclient.http as triton


def main() -> None:
    """Print the drawing, and what the server thinks it is."""
    options = picture.arguments("read a drawn digit over HTTP", "localhost:8000")
    rows = picture.read(options.picture)
    client = triton.InferenceServerClient(options.url)

    # The models have a batch dimension: this is a batch of one picture.
    image = np.array([rows], np.uint8)
    image_input = triton.InferInput("image", image.shape, "UINT8")
    image_input.set_data_from_numpy(image)
    pixels = client.infer("digits_preprocess", [image_input]).as_numpy("pixels")

    pixels_input = triton.InferInput("pixels", pixels.shape, "FP32")
    pixels_input.set_data_from_numpy(pixels)
    # With a class count the answer is not 10 numbers, but the best three as "probability:index:label".
    output = triton.InferRequestedOutput("probabilities", class_count=3)
    best = client.infer("digits", [pixels_input], outputs=[output]).as_numpy("probabilities")[0]

    print(picture.show(rows))
    for entry in best:
        probability, _, label = entry.decode().split(":")
        print(f"{label:8}{float(probability):6.1%}")


if __name__ == "__main__":
    main()
