"""Models for TensorFlow: SavedModels and frozen graphs.

The way of a model: ``plan`` works out from the configuration how its session has to be. A SavedModel says what it takes
and gives in a file that ``saved_model`` reads by itself, so a configuration is completed, and a wrong one refused,
before TensorFlow is there; of a ``frozen_graph`` only TensorFlow can tell. A ``session`` is opened, and a
``computation`` runs it. The rest is in ``nerite.backends.arrays``.

TensorFlow takes seconds and some hundred megabytes to import, and gives nothing back. So its instances live in worker
processes, and it is imported there when the session is opened.
"""

from nerite.frameworks.tensorflow.backend import TensorFlowBackend

__all__ = ["TensorFlowBackend"]
