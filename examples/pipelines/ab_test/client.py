"""Has a hundred users read handwritten digits, with the model itself and with the ensemble.

pip install 'tritonclient[http]' scikit-learn
python examples/pipelines/ab_test/client.py
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
import tritonclient.http as triton
from digits import unseen

USERS = 100


def main() -> None:
    """Print how many users each version had, and how well it did by them."""
    parser = argparse.ArgumentParser(description="compare two versions of a model that reads digits")
    parser.add_argument("--url", default="localhost:8000", help="host and port of the server (default: %(default)s)")
    client = triton.InferenceServerClient(parser.parse_args().url)
    print("                       users   digits   right")
    for model in ("digits", "ab_ensemble"):
        users: dict[int, set[str]] = defaultdict(set)
        right: dict[int, list[bool]] = defaultdict(list)
        for number, (pixels, digit) in enumerate(zip(*unseen(), strict=True)):
            user = f"user {number % USERS}"
            answer = client.infer(model, [as_input("pixels", pixels[None], "FP32")], headers={"x-user": user})
            version = answer.as_numpy("version").item()
            users[version].add(user)
            right[version].append(answer.as_numpy("digit").item() == digit)
        for version in sorted(users):
            share = np.mean(right[version])
            print(f"{model:14}version {version}{len(users[version]):6}{len(right[version]):9}{share:8.0%}")


def as_input(name: str, array: np.ndarray, datatype: str) -> triton.InferInput:
    """Return an array as an input."""
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


if __name__ == "__main__":
    main()
