"""Makes the weights of this example: an index of 50,000 handwritten digits.

    python examples/pipelines/batching/make_index.py

A second or two, and the same result each time. They are scikit-learn's, each turned and shifted a little, many times.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from digits import known
from scipy import ndimage

TARGET = Path(__file__).resolve().parent / "models" / "neighbours" / "1" / "index.npz"
SIZE = 50_000


def main() -> None:
    """Vary the digits, and store them with what they show."""
    images, digits = known()
    chance = np.random.default_rng(0)
    variants, labels = [images], [digits]
    while sum(map(len, variants)) < SIZE:
        shift = (0, *chance.uniform(-0.7, 0.7, 2))
        turned = ndimage.rotate(images, chance.uniform(-12, 12), axes=(1, 2), reshape=False, order=1)
        variants.append(ndimage.shift(turned, shift, order=1))
        labels.append(digits)
    vectors = np.concatenate(variants)[:SIZE].reshape(SIZE, -1).astype(np.float32)
    np.savez(TARGET, vectors=vectors, digits=np.concatenate(labels)[:SIZE].astype(np.int32))
    print(f"{SIZE} vectors, {vectors.nbytes // 2**20} MB")


if __name__ == "__main__":
    main()
