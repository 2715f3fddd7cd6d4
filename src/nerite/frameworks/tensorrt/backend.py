"""The backend: completes configurations, opens engines, makes their instances."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nerite.backends.arrays import graph
from nerite.backends.arrays.calls import strings_as_bytes
from nerite.backends.arrays.instance import ArrayInstance, of_graph
from nerite.backends.configuration import boolean_parameter
from nerite.backends.interface import ExecutionTimes, InstanceContext, ModelContext
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.frameworks.tensorrt import engine, execution
from nerite.frameworks.tensorrt.engine import EngineDescription, Profile, find_plan, group_of, largest_batch, of_group
from nerite.frameworks.tensorrt.execution import EngineExecution, ExecutionPath

_log = logging.getLogger("nerite.frameworks.tensorrt")

Groups = Sequence[Mapping[str, Any]]

_STRATEGIES: Final = ("STATIC", "ON_PROFILE_CHANGE")


class TensorRtBackend:
    """Engines that TensorRT has built, on NVIDIA GPUs."""

    name = "tensorrt"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the engine.

        The engine is left in the context for ``open``. Raises ``NeriteError``.
        """
        if not graph.needs_completion(context):
            return context.config
        opener = EngineOpener(context)
        device = _first_device(context.config)
        opened = context.memo[opener.path] = {device: opener.open(device)}
        description = engine.describe(context.name, opened[device])
        return completed(context, description)

    def open(self, context: ModelContext) -> TensorRtModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return TensorRtModel(context)


class EngineOpener:
    """Opens the engine of one model, on any GPU."""

    def __init__(self, context: ModelContext) -> None:
        """Raise ``NeriteError`` if the plan is missing or none."""
        self.path: Path = find_plan(context)
        self._model = context.name
        settings = context.settings
        self._plugins = [plugin for plugin in settings.get("plugins", "").strip('"').split(";") if plugin]
        self._version_compatible = boolean_parameter(settings.get("version-compatible", "false"))

    def open(self, device: int) -> Any:
        """Return an engine on a GPU. Slow. Raises ``NeriteError``."""
        execution.require_device(self._model, device)
        execution.use(device)
        return engine.open_engine(self._model, self.path, self._plugins, version_compatible=self._version_compatible)


class TensorRtModel:
    """An open model: an engine for each GPU, which the instances on it share."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self._context = context
        self._opener = EngineOpener(context)
        self._lock = threading.Lock()
        self._engines: dict[int, Any] = context.memo.pop(self._opener.path, {})
        self._description = engine.describe(context.name, self._engine(_first_device(config)))
        check_batches(context.name, config, self._description)
        self._face = of_graph(context, self._description.graph, strings_as_bytes)

    def instance(self, context: InstanceContext) -> TensorRtInstance:
        """Make an instance, with contexts of its own. Raises ``NeriteError``."""
        if context.kind != "GPU":
            raise InvalidArgument(
                f"unable to load model '{self._context.name}', TensorRT backend supports only GPU device: instance "
                f"'{context.name}' is of KIND_{context.kind}. Set kind: KIND_GPU"
            )
        way = way_of(self._context, context, len(self._description.profiles))
        computation = EngineExecution(self._context.name, self._engine(context.device), self._description, way)
        return TensorRtInstance(self._face.instance(computation), computation)

    def close(self) -> None:
        """Let go of the engines."""
        self._engines.clear()

    def _engine(self, device: int) -> Any:
        with self._lock:
            if device not in self._engines:
                self._engines[device] = self._opener.open(device)
            return self._engines[device]


class TensorRtInstance:
    """An instance, and what it has to give back."""

    def __init__(self, arrays: ArrayInstance, computation: EngineExecution) -> None:
        self._arrays = arrays
        self._computation = computation

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Answer a batch with one run of the engine. Raises ``NeriteError``."""
        return self._arrays.execute(requests, timings)

    checks_readiness = False

    def is_ready(self) -> bool:
        """Return True: an engine has no bad days."""
        return True

    def close(self) -> None:
        """Give contexts and memory back."""
        self._arrays.close()
        self._computation.close()


def completed(context: ModelContext, description: EngineDescription) -> dict[str, Any]:
    """Return the configuration of a model, filled in from what its engine says. Pure, but for the log."""
    config = context.config
    check_batches(context.name, config, description)
    most = largest_batch(_profiles_in_use(context.name, config, description))
    # Sizes as values have no rows that could be joined.
    filled = graph.complete_from_graph(context, description.graph, 0 if description.shape_tensors else most)
    for side in ("input", "output"):
        if not config.get(side):
            filled[side] = [
                {**entry, "is_shape_tensor": True} if entry["name"] in description.shape_tensors else entry
                for entry in filled.get(side, ())
            ]
    return filled


def check_batches(model: str, config: Mapping[str, Any], description: EngineDescription) -> None:
    """Raise ``NeriteError`` if a configuration allows batches that the engine does not take."""
    rows = int(config.get("max_batch_size", 0))
    if not rows:
        return
    if description.shape_tensors:
        raise Unsupported(
            f"unable to load model '{model}': {', '.join(sorted(description.shape_tensors))} hold sizes as values, and "
            "requests with such tensors are not batched here. Set max_batch_size: 0, and give all dimensions in 'dims'"
        )
    most = largest_batch(_profiles_in_use(model, config, description))
    if rows > most:
        raise Internal(
            f"autofill failed for model '{model}': configuration specified max-batch {rows} but TensorRT engine only "
            f"supports max-batch {most}. Set max_batch_size: {most}, or build the engine with a profile for {rows} rows"
        )


def way_of(context: ModelContext, instance: InstanceContext, there: int) -> ExecutionPath:
    """Return how an instance runs, of an engine with so many profiles. Raises ``InvalidArgument``."""
    config = context.config
    strategy = context.parameter("execution_context_allocation_strategy", "STATIC")
    if strategy not in _STRATEGIES:
        raise InvalidArgument(
            f"unable to load model '{context.name}': execution_context_allocation_strategy is '{strategy}', and may be "
            f"{' or '.join(_STRATEGIES)}"
        )
    optimization = config.get("optimization", {})
    return ExecutionPath(
        instance.device,
        of_group(context.name, group_of(config, instance.name), there),
        strategy,
        optimization.get("priority", "PRIORITY_DEFAULT"),
        bool(optimization.get("cuda", {}).get("graphs", False)),
    )


def _profiles_in_use(model: str, config: Mapping[str, Any], description: EngineDescription) -> list[Profile]:
    groups: Groups = config.get("instance_group") or ({},)
    there = len(description.profiles)
    chosen = {index for group in groups for index in of_group(model, group, there)}
    return [description.profiles[index] for index in sorted(chosen)]


def _first_device(config: Mapping[str, Any]) -> int:
    groups: Groups = config.get("instance_group") or ({},)
    return next((int(gpu) for group in groups for gpu in group.get("gpus", ())), 0)
