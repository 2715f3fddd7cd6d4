"""Backend for TensorFlow: SavedModels and frozen graphs.

``plan`` derives the options of a session from the configuration. ``files`` reads what a model takes and gives: of a
SavedModel without TensorFlow, so that a configuration is completed or rejected before that is imported; a frozen graph
needs TensorFlow. ``session`` opens and runs sessions, and ``backend`` connects these with the base of array backends.

Importing TensorFlow takes seconds and some hundred megabytes that are never freed. So its instances run in worker
processes, which import it when they open a session.
"""

from nerite.frameworks.tensorflow.backend import TensorFlowBackend

__all__ = ["TensorFlowBackend"]
