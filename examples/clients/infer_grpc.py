"""Reads a drawn digit through two models, with NVIDIA's client over gRPC.

pip install 'tritonclient[grpc]'
python examples/clients/infer_grpc.py [examples/clients/pictures/three.txt]
"""

from __future__ import annotations

import numpy as np
import picture
import tritonclient.grpc as triton


def main() -> None:
    """Print the drawing, and what the server thinks it is."""
    options = picture.arguments("read a drawn digit over gRPC", "localhost:8001")
    rows = picture.read(options.picture)
    client = triton.InferenceServerClient(options.url)

    # The models have a batch dimension: this is a batch of one picture.
    image = np.array([rows], np.uint8)
    image_input = triton.InferInput("image", image.shape, "UINT8")
    image_input.set_data_from_numpy(image)
    pixels = client.infer("digits_preprocess", [image_input]).as_numpy("pixels")

    pixels_input = triton.InferInput("pixels", pixels.shape, "FP32")
    pixels_input.set_data_from_numpy(pixels)
    # No outputs are named, so all come, as numbers.
    probabilities = client.infer("digits", [pixels_input]).as_numpy("probabilities")[0]

    print(picture.show(rows))
    for digit in probabilities.argsort()[:-4:-1]:
        print(f"{digit:<8}{probabilities[digit]:6.1%}")


if __name__ == "__main__":
    main()
