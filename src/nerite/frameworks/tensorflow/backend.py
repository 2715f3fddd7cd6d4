"""The TensorFlow backend: completes configurations, opens models and runs their sessions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from nerite.backends.arrays.backend import ArrayBackend, ArrayModel
from nerite.backends.arrays.graph import GraphTensor, ModelGraph, complete_from_graph, declaration, needs_completion
from nerite.backends.arrays.instance import Compute
from nerite.backends.configuration import batching, first_instance, model_dims
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import NeriteError
from nerite.frameworks.tensorflow import files, plan, session
from nerite.frameworks.tensorflow.plan import TensorFlowPlan, TensorFlowSignature

_SIDES = ("input", "output")


class TensorFlowModel(ArrayModel[TensorFlowPlan]):
    """Open model. Each instance has its own session, and as a rule its own process."""

    def open(self) -> None:
        """Read the model, and compare it with its configuration. Logs which parameters have no effect."""
        plan.log_ignored_parameters(self.context)
        super().open()

    def source(self) -> Hashable:
        """Return everything that determines what ``read`` returns."""
        wanted = self.key(first_instance(self.context))
        return wanted.path, wanted.tags, wanted.signature

    def read(self) -> Any:
        """Return the ``tf.Graph`` of a frozen graph, or the signature of a SavedModel. Raises ``NeriteError``."""
        wanted = self.key(first_instance(self.context))
        if not wanted.frozen:
            return files.read_signature(self.context.name, wanted)
        framework = self._framework()
        session.load_libraries(framework, wanted)
        # If an instance group says so, the devices in the graph count, and not those of the instances.
        groups = self.context.config.get("instance_group", ())
        placed = any(group.get("kind") == "KIND_MODEL" for group in groups)
        return files.read_graph(framework, self.context.name, wanted.path, placed=placed)

    def graph(self, copy: Any) -> ModelGraph:
        """Return the inputs and outputs, whose shapes the configuration may have to complete."""
        return self._signature(copy).graph

    def completed(self, copy: Any) -> dict[str, Any]:
        """Return the configuration with what it lacks, which may be parts of an entry. Raises ``InvalidArgument``.

        If an entry declares all dimensions that the tensor has in the model, the configuration means a model without
        batching, even if the model supports it.
        """
        config, graph = self.context.config, self.graph(copy)
        tensors = {"input": {**graph.defaulted, **graph.inputs}, "output": graph.outputs}
        whole = not batching(config) and any(
            _declares_all_dims(entry, tensors[side].get(entry["name"]))
            for side in _SIDES
            for entry in config.get(side, ())
        )
        completed = complete_from_graph(self.context, graph, 0 if whole else None)
        batched = batching(completed)
        for side in _SIDES:
            completed[side] = [_filled(entry, tensors[side].get(entry["name"]), batched) for entry in completed[side]]
        return completed

    def key(self, instance: InstanceContext) -> TensorFlowPlan:
        """Return the plan of the session for an instance."""
        return plan.make_plan(self.context, instance)

    def load(self, key: TensorFlowPlan) -> Any:
        """Open a session. Raises ``NeriteError``."""
        framework = self._framework()
        if not key.frozen:
            session.load_libraries(framework, key)
        return session.open_session(framework, key, self._artifact if key.frozen else framework.Graph())

    def computation(self, copy: Any, instance: InstanceContext) -> Compute:
        """Return the function that runs a session."""
        return session.runner_of_session(self._framework(), copy, self._signature(self._artifact))

    def failure(self, error: Exception) -> NeriteError:
        """Translate an exception from TensorFlow."""
        return session.translated(error)

    def _signature(self, artifact: Any) -> TensorFlowSignature:
        self._artifact = artifact
        name, config = self.context.name, self.context.config
        if self.key(first_instance(self.context)).frozen:
            return files.signature_of_graph(artifact, name, config)
        return files.signature_of_saved_model(artifact, name, config)

    def _framework(self) -> Any:
        return session.tensorflow(alone=self.context.parameter("EXECUTION_MODE", "worker") == "worker")


class TensorFlowBackend(ArrayBackend):
    """Backend for SavedModels and frozen graphs on TensorFlow. Completion needs TensorFlow only for frozen graphs."""

    name = "tensorflow"
    isolated = True
    model = TensorFlowModel

    def needs_completion(self, context: ModelContext) -> bool:
        """Return True also if an entry of the configuration lacks its type or dimensions."""
        entries = [entry for side in _SIDES for entry in context.config.get(side, ())]
        return any(_lacks(entry) for entry in entries) or needs_completion(context)


def _lacks(entry: Mapping[str, Any]) -> bool:
    return not entry.get("dims") or entry.get("data_type", "TYPE_INVALID") == "TYPE_INVALID"


def _declares_all_dims(entry: Mapping[str, Any], tensor: GraphTensor | None) -> bool:
    dims = model_dims(entry)
    return tensor is not None and len(dims) > 0 and len(dims) == len(tensor.dims)


def _filled(entry: Mapping[str, Any], tensor: GraphTensor | None, batched: bool) -> Mapping[str, Any]:
    if tensor is None or not _lacks(entry):
        return entry
    declared = {key: value for key, value in entry.items() if value not in ([], (), "TYPE_INVALID")}
    return {**declaration(tensor, batched), **declared}
