"""Scikit-learn's handwritten digits: two thirds for the index, one third to ask about."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits


def known() -> tuple[np.ndarray, np.ndarray]:
    """Return images, (n, 8, 8) from 0 to 16, and what they show."""
    data = load_digits()
    kept = np.arange(len(data.target)) % 3 > 0
    return data.images[kept], data.target[kept]


def unseen() -> tuple[np.ndarray, np.ndarray]:
    """Return the others as rows of pixels, (n, 64), and what they show."""
    data = load_digits()
    return data.data[::3].astype(np.float32), data.target[::3]
