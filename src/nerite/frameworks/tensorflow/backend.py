"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nerite.backends.arrays.calls import strings_as_bytes
from nerite.backends.arrays.graph import GraphTensor, ModelGraph, complete_from_graph, declaration, needs_completion
from nerite.backends.arrays.instance import ArrayInstance, of_graph
from nerite.backends.configuration import batching, model_dims
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.frameworks.tensorflow import files, plan, session
from nerite.frameworks.tensorflow.plan import TensorFlowSignature
from nerite.frameworks.tensorflow.session import tensorflow

# What is special in completing the configuration of a TensorFlow model. Pure.

_SIDES = ("input", "output")


def completion_needed(context: ModelContext) -> bool:
    """Return whether the model has to be asked: whole sides, or parts of an entry, are missing."""
    entries = [entry for side in _SIDES for entry in context.config.get(side, ())]
    return any(_lacks(entry) for entry in entries) or needs_completion(context)


def complete_model(context: ModelContext, graph: ModelGraph) -> Mapping[str, Any]:
    """Return the configuration with what it lacks. Raises ``InvalidArgument`` as ``arrays.completion`` does.

    An entry may have a name and nothing else. Where the dimensions of an entry are all that the model has, the
    configuration means a model without batches, whether it could have them or not.
    """
    config = context.config
    tensors = {"input": {**graph.defaulted, **graph.inputs}, "output": graph.outputs}
    whole = not batching(config) and any(
        _is_whole(entry, tensors[side].get(entry["name"])) for side in _SIDES for entry in config.get(side, ())
    )
    completed = complete_from_graph(context, graph, 0 if whole else None)
    batched = batching(completed)
    for side in _SIDES:
        completed[side] = [_filled(entry, tensors[side].get(entry["name"]), batched) for entry in completed[side]]
    return completed


def _lacks(entry: Mapping[str, Any]) -> bool:
    return not entry.get("dims") or entry.get("data_type", "TYPE_INVALID") == "TYPE_INVALID"


def _is_whole(entry: Mapping[str, Any], tensor: GraphTensor | None) -> bool:
    dims = model_dims(entry)
    return tensor is not None and len(dims) > 0 and len(dims) == len(tensor.dims)


def _filled(entry: Mapping[str, Any], tensor: GraphTensor | None, batched: bool) -> Mapping[str, Any]:
    if tensor is None or not _lacks(entry):
        return entry
    from_model = declaration(tensor, batched)
    said = {key: value for key, value in entry.items() if value not in ([], (), "TYPE_INVALID")}
    return {**from_model, **said}


class TensorFlowBackend:
    """SavedModels and frozen graphs, on TensorFlow."""

    name = "tensorflow"
    isolated = True

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        TensorFlow is needed for a frozen graph only. Raises ``NeriteError``.
        """
        if not completion_needed(context):
            return context.config
        return complete_model(context, _Artifact(context).signature.graph)

    def open(self, context: ModelContext) -> TensorFlowModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return TensorFlowModel(context)


class _Artifact:
    """The file, or directory, of a model, and what it takes and gives."""

    def __init__(self, context: ModelContext) -> None:
        wanted = plan.make_plan(context, InstanceContext(context.name))
        self.graph: Any = None
        """The ``tf.Graph`` of a frozen graph."""
        if wanted.frozen:
            framework = _imported(context)
            session.load_libraries(framework, wanted)
            self.graph = files.read_graph(framework, context.name, wanted.path, placed=_placed(context))
            self.signature: TensorFlowSignature = files.signature_of(self.graph, context.name, context.config)
        else:
            self.signature = files.read_signature(context.name, wanted, context.config)


class TensorFlowModel:
    """An open model. Each instance has a session of its own: as a rule it has a process of its own, too."""

    def __init__(self, context: ModelContext) -> None:
        plan.remark(context)
        self._context = context
        self._artifact = _Artifact(context)
        self._face = of_graph(context, self._artifact.signature.graph, strings_as_bytes)

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance with a session of its own. Raises ``NeriteError``."""
        framework = _imported(self._context)
        wanted = plan.make_plan(self._context, context)
        if self._artifact.graph is not None:
            opened = session.of_graph(framework, wanted, self._artifact.graph)
        else:
            session.load_libraries(framework, wanted)
            opened = session.of_saved_model(framework, wanted)
        return self._face.instance(session.runner_of_session(framework, opened, self._artifact.signature))

    def close(self) -> None:
        """Let go of the graph; sessions end with their instances."""
        self._artifact.graph = None


def _placed(context: ModelContext) -> bool:
    """Return whether the graph itself says which device does what, and not the instance."""
    return any(group.get("kind") == "KIND_MODEL" for group in context.config.get("instance_group", ()))


def _imported(context: ModelContext) -> Any:
    """Return TensorFlow. Slow the first time. Raises ``Unsupported`` where it is not installed."""
    return tensorflow(alone=context.parameter("EXECUTION_MODE", "worker") == "worker")
