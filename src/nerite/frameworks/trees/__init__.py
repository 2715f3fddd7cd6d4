"""Forests of decision trees: XGBoost, LightGBM, and what treelite reads of scikit-learn's and others.

``forest`` finds a model's file and has treelite read and describe it. ``parameters`` reads the configuration's
parameters. ``engines`` and ``onnx_engine`` compute predictions, behind one small interface. ``backend`` compares the
configuration with the model, and shapes the engine's numbers into the declared outputs.

``native`` opens the libraries of Python packages; only ONNX Runtime and nvForest are imported as packages.
"""

from nerite.frameworks.trees.backend import TreesBackend

__all__ = ["TreesBackend"]
