"""Makes the weights of the two versions of ``digits``, on scikit-learn's 1,797 handwritten digits.

    python examples/pipelines/ab_test/train.py

A second or two, and the same result each time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from digits import known, unseen
from sklearn.linear_model import LogisticRegression

DIGITS = Path(__file__).resolve().parent / "models" / "digits"


def main() -> None:
    """Learn twice, and say how good each is."""
    pixels, right = known()
    centres = np.stack([pixels[right == digit].mean(axis=0) for digit in range(10)])
    np.savez(DIGITS / "1" / "weights.npz", centres=centres.astype(np.float32))

    regression = LogisticRegression(max_iter=1000).fit(pixels / 16, right)
    weights, bias = regression.coef_.T / 16, regression.intercept_
    np.savez(DIGITS / "2" / "weights.npz", weights=weights.astype(np.float32), bias=bias.astype(np.float32))

    pixels, right = unseen()
    nearest = ((pixels[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    print(f"version 1, nearest centre:      {(nearest == right).mean():.1%} of {len(right)} unseen digits are right")
    likeliest = (pixels @ weights + bias).argmax(axis=1)
    print(f"version 2, logistic regression: {(likeliest == right).mean():.1%}")


if __name__ == "__main__":
    main()
