"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nerite.backends.arrays import face
from nerite.backends.arrays.instance import ArrayInstance
from nerite.backends.arrays.strings import as_bytes
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.tensorflow import completion, computation, frozen_graph, plan, saved_model, session
from nerite.backends.tensorflow.framework import tensorflow
from nerite.backends.tensorflow.signature import Signature


class TensorFlowBackend:
    """SavedModels and frozen graphs, on TensorFlow."""

    name = "tensorflow"
    isolated = True

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        TensorFlow is needed for a frozen graph only. Raises ``NeriteError``.
        """
        if not completion.is_needed(context):
            return context.config
        return completion.complete(context, _Artifact(context).signature.graph)

    def open(self, context: ModelContext) -> TensorFlowModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return TensorFlowModel(context)


class _Artifact:
    """The file, or directory, of a model, and what it takes and gives."""

    def __init__(self, context: ModelContext) -> None:
        wanted = plan.make(context, InstanceContext(context.name))
        self.graph: Any = None
        """The ``tf.Graph`` of a frozen graph."""
        if wanted.frozen:
            framework = _imported(context)
            session.load_libraries(framework, wanted)
            self.graph = frozen_graph.read_graph(framework, context.name, wanted.path, placed=_placed(context))
            self.signature: Signature = frozen_graph.signature_of(self.graph, context.name, context.config)
        else:
            self.signature = saved_model.read_signature(context.name, wanted, context.config)


class TensorFlowModel:
    """An open model. Each instance has a session of its own: as a rule it has a process of its own, too."""

    def __init__(self, context: ModelContext) -> None:
        plan.remark(context)
        self._context = context
        self._artifact = _Artifact(context)
        self._face = face.of_graph(context, self._artifact.signature.graph, as_bytes)

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance with a session of its own. Raises ``NeriteError``."""
        framework = _imported(self._context)
        wanted = plan.make(self._context, context)
        if self._artifact.graph is not None:
            opened = session.of_graph(framework, wanted, self._artifact.graph)
        else:
            session.load_libraries(framework, wanted)
            opened = session.of_saved_model(framework, wanted)
        return self._face.instance(computation.of_session(framework, opened, self._artifact.signature))

    def close(self) -> None:
        """Let go of the graph; sessions end with their instances."""
        self._artifact.graph = None


def _placed(context: ModelContext) -> bool:
    """Return whether the graph itself says which device does what, and not the instance."""
    return any(group.get("kind") == "KIND_MODEL" for group in context.config.get("instance_group", ()))


def _imported(context: ModelContext) -> Any:
    """Return TensorFlow. Slow the first time. Raises ``Unsupported`` where it is not installed."""
    return tensorflow(alone=context.parameter("EXECUTION_MODE", "worker") == "worker")
