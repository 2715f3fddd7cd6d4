"""The backend: completes configurations, opens engines, makes their instances."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nerite.backends.arrays import completion, face
from nerite.backends.arrays.instance import ArrayInstance
from nerite.backends.arrays.strings import as_bytes
from nerite.backends.interface import InstanceContext, Marks, ModelContext
from nerite.backends.tensorrt import cuda, engine, plan_file, profiles
from nerite.backends.tensorrt.computation import Computation, Way
from nerite.backends.tensorrt.description import Description, Profile, largest_batch
from nerite.backends.values import boolean
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse

_log = logging.getLogger("nerite.backends.tensorrt")

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
        if not completion.is_needed(context):
            return context.config
        opener = Opener(context)
        device = _first_device(context.config)
        opened = context.memo[opener.path] = {device: opener.open(device)}
        description = engine.describe(context.name, opened[device])
        return completed(context, description)

    def open(self, context: ModelContext) -> TensorRtModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return TensorRtModel(context)


class Opener:
    """Opens the engine of one model, on any GPU."""

    def __init__(self, context: ModelContext) -> None:
        """Raise ``NeriteError`` if the plan is missing or none."""
        self.path: Path = plan_file.find(context)
        self._model = context.name
        settings = context.settings
        self._plugins = [plugin for plugin in settings.get("plugins", "").strip('"').split(";") if plugin]
        self._version_compatible = boolean(settings.get("version-compatible", "false"))

    def open(self, device: int) -> Any:
        """Return an engine on a GPU. Slow. Raises ``NeriteError``."""
        cuda.require_device(self._model, device)
        cuda.use(device)
        return engine.open_engine(self._model, self.path, self._plugins, version_compatible=self._version_compatible)


class TensorRtModel:
    """An open model: an engine for each GPU, which the instances on it share."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self._context = context
        self._opener = Opener(context)
        self._lock = threading.Lock()
        self._engines: dict[int, Any] = context.memo.pop(self._opener.path, {})
        self._description = engine.describe(context.name, self._engine(_first_device(config)))
        check_batches(context.name, config, self._description)
        self._face = face.of_graph(context, self._description.graph, as_bytes)

    def instance(self, context: InstanceContext) -> TensorRtInstance:
        """Make an instance, with contexts of its own. Raises ``NeriteError``."""
        if context.kind != "GPU":
            raise InvalidArgument(
                f"unable to load model '{self._context.name}', TensorRT backend supports only GPU device: instance "
                f"'{context.name}' is of KIND_{context.kind}. Set kind: KIND_GPU"
            )
        way = way_of(self._context, context, len(self._description.profiles))
        computation = Computation(self._context.name, self._engine(context.device), self._description, way)
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

    def __init__(self, arrays: ArrayInstance, computation: Computation) -> None:
        self._arrays = arrays
        self._computation = computation

    def execute(self, requests: Sequence[InferenceRequest], marks: Marks) -> Sequence[InferenceResponse]:
        """Answer a batch with one run of the engine. Raises ``NeriteError``."""
        return self._arrays.execute(requests, marks)

    checks_readiness = False

    def is_ready(self) -> bool:
        """Return True: an engine has no bad days."""
        return True

    def close(self) -> None:
        """Give contexts and memory back."""
        self._arrays.close()
        self._computation.close()


def completed(context: ModelContext, description: Description) -> dict[str, Any]:
    """Return the configuration of a model, filled in from what its engine says. Pure, but for the log."""
    config = context.config
    check_batches(context.name, config, description)
    most = largest_batch(_profiles_in_use(context.name, config, description))
    # Sizes as values have no rows that could be joined.
    filled = completion.complete(context, description.graph, 0 if description.shape_tensors else most)
    for side in ("input", "output"):
        if not config.get(side):
            filled[side] = [
                {**entry, "is_shape_tensor": True} if entry["name"] in description.shape_tensors else entry
                for entry in filled.get(side, ())
            ]
    return filled


def check_batches(model: str, config: Mapping[str, Any], description: Description) -> None:
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


def way_of(context: ModelContext, instance: InstanceContext, there: int) -> Way:
    """Return how an instance runs, of an engine with so many profiles. Raises ``InvalidArgument``."""
    config = context.config
    strategy = context.parameter("execution_context_allocation_strategy", "STATIC")
    if strategy not in _STRATEGIES:
        raise InvalidArgument(
            f"unable to load model '{context.name}': execution_context_allocation_strategy is '{strategy}', and may be "
            f"{' or '.join(_STRATEGIES)}"
        )
    optimization = config.get("optimization", {})
    return Way(
        instance.device,
        profiles.of_group(context.name, profiles.group_of(config, instance.name), there),
        strategy,
        optimization.get("priority", "PRIORITY_DEFAULT"),
        bool(optimization.get("cuda", {}).get("graphs", False)),
    )


def _profiles_in_use(model: str, config: Mapping[str, Any], description: Description) -> list[Profile]:
    groups: Groups = config.get("instance_group") or ({},)
    there = len(description.profiles)
    chosen = {index for group in groups for index in profiles.of_group(model, group, there)}
    return [description.profiles[index] for index in sorted(chosen)]


def _first_device(config: Mapping[str, Any]) -> int:
    groups: Groups = config.get("instance_group") or ({},)
    return next((int(gpu) for group in groups for gpu in group.get("gpus", ())), 0)
