"""The TensorRT backend: completes configurations, opens engines, and runs them for instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.backends.arrays.backend import ArrayBackend, ArrayModel
from nerite.backends.arrays.graph import ModelGraph, complete_from_graph
from nerite.backends.configuration import TensorPort, boolean_parameter
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.devices import cuda
from nerite.frameworks.tensorrt import engine, execution
from nerite.frameworks.tensorrt.engine import (
    EngineDescription,
    Profile,
    find_plan,
    group_of,
    instance_groups,
    largest_batch,
    profiles_of_group,
)
from nerite.frameworks.tensorrt.execution import EngineExecution, ExecutionOptions

_STRATEGIES: Final = ("STATIC", "ON_PROFILE_CHANGE")


class EngineKey(NamedTuple):
    """Engine of one plan on one GPU."""

    path: Path
    device: int


class TensorRtModel(ArrayModel[EngineKey]):
    """Open model: an engine for each GPU, which the instances on it share."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._path = find_plan(context)
        self._description = EngineDescription((), (), ())

    def key(self, instance: InstanceContext) -> EngineKey:
        """Return the plan and the GPU of an instance."""
        return EngineKey(self._path, instance.device)

    def load(self, key: EngineKey) -> Any:
        """Open the engine on a GPU. Slow. Raises ``NeriteError``."""
        execution.require_device(self.context.name, key.device)
        cuda.use(key.device)
        settings = self.context.settings
        plugins = [plugin for plugin in settings.get("plugins", "").strip('"').split(";") if plugin]
        version_compatible = boolean_parameter(settings.get("version-compatible", "false"))
        return engine.open_engine(self.context.name, key.path, plugins, version_compatible=version_compatible)

    def shares(self, key: EngineKey, copy: Any) -> bool:
        """Return True: each instance has its own execution contexts."""
        return True

    def graph(self, copy: Any) -> ModelGraph:
        """Describe the engine, and return its inputs and outputs."""
        self._description = engine.describe(self.context.name, copy)
        return self._description.graph

    def completed(self, copy: Any) -> dict[str, Any]:
        """Return the configuration, completed from the engine."""
        self.graph(copy)
        return complete_from_description(self.context, self._description)

    def ports(self, copy: Any) -> tuple[Sequence[TensorPort], Sequence[TensorPort]]:
        """Return the declared inputs and outputs. Raises ``NeriteError`` also for batches that are too large."""
        self.graph(copy)
        check_batches(self.context.name, self.context.config, self._description)
        return super().ports(copy)

    def computation(self, copy: Any, instance: InstanceContext) -> EngineExecution:
        """Return a computation with its own execution contexts. Raises ``NeriteError``."""
        if instance.kind != "GPU":
            raise InvalidArgument(
                f"unable to load model '{self.context.name}', TensorRT backend supports only GPU device: instance "
                f"'{instance.name}' is of KIND_{instance.kind}. Set kind: KIND_GPU"
            )
        options = execution_options(self.context, instance, len(self._description.profiles))
        return EngineExecution(self.context.name, copy, self._description, options)


class TensorRtBackend(ArrayBackend):
    """Backend for engines that TensorRT has built, on NVIDIA GPUs."""

    name = "tensorrt"
    model = TensorRtModel


def complete_from_description(context: ModelContext, description: EngineDescription) -> dict[str, Any]:
    """Return the configuration of a model, completed from its engine. Pure, except for the log."""
    config = context.config
    check_batches(context.name, config, description)
    largest = largest_batch(_profiles_in_use(context.name, config, description))
    # Tensors that hold sizes have no rows that could be joined.
    completed = complete_from_graph(context, description.graph, 0 if description.shape_tensors else largest)
    for side in ("input", "output"):
        if not config.get(side):
            completed[side] = [
                {**entry, "is_shape_tensor": True} if entry["name"] in description.shape_tensors else entry
                for entry in completed.get(side, ())
            ]
    return completed


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
    largest = largest_batch(_profiles_in_use(model, config, description))
    if rows > largest:
        raise Internal(
            f"autofill failed for model '{model}': configuration specified max-batch {rows} but TensorRT engine only "
            f"supports max-batch {largest}. Set max_batch_size: {largest}, or build the engine with a profile for "
            f"{rows} rows"
        )


def execution_options(context: ModelContext, instance: InstanceContext, profile_count: int) -> ExecutionOptions:
    """Return how an instance runs an engine with ``profile_count`` profiles. Raises ``InvalidArgument``."""
    config = context.config
    strategy = context.parameter("execution_context_allocation_strategy", "STATIC")
    if strategy not in _STRATEGIES:
        raise InvalidArgument(
            f"unable to load model '{context.name}': execution_context_allocation_strategy is '{strategy}', and may be "
            f"{' or '.join(_STRATEGIES)}"
        )
    optimization = config.get("optimization", {})
    return ExecutionOptions(
        instance.device,
        profiles_of_group(context.name, group_of(config, instance.name), profile_count),
        strategy,
        optimization.get("priority", "PRIORITY_DEFAULT"),
        bool(optimization.get("cuda", {}).get("graphs", False)),
    )


def _profiles_in_use(model: str, config: Mapping[str, Any], description: EngineDescription) -> list[Profile]:
    count = len(description.profiles)
    chosen = {index for group in instance_groups(config) for index in profiles_of_group(model, group, count)}
    return [description.profiles[index] for index in sorted(chosen)]
