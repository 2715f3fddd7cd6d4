"""Forests of decision trees: XGBoost, LightGBM, and what treelite makes of scikit-learn's and others.

The way of a model: ``artifact`` finds the file and tells its format, ``forest`` has treelite read and describe it,
``parameters`` is what the configuration wants of it. ``completion`` fills the configuration in, ``agreement`` compares.
``engines`` compute, each behind the same small interface; ``answers`` makes of their numbers what clients asked for.

``native`` opens the libraries that Python packages bring; only ONNX Runtime and nvForest are imported as packages.
"""

from nerite.frameworks.trees.backend import TreesBackend

__all__ = ["TreesBackend"]
