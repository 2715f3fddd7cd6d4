"""Scikit-learn's handwritten digits: half to learn from, half that no model has seen."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

Lesson = tuple[np.ndarray, np.ndarray]


def known() -> Lesson:
    """Return pixels, (n, 64) from 0 to 16, and what they show."""
    pixels, right = load_digits(return_X_y=True)
    return pixels[::2].astype(np.float32), right[::2]


def unseen() -> Lesson:
    """Return the other half."""
    pixels, right = load_digits(return_X_y=True)
    return pixels[1::2].astype(np.float32), right[1::2]
