"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from nerite.backends.arrays import completion, face
from nerite.backends.arrays.instance import ArrayInstance
from nerite.backends.configuration import batching
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.openvino import fitting, framework, graph, plan, properties, reading
from nerite.backends.openvino.inference import Inference
from nerite.backends.openvino.plan import CompilePlan
from nerite.backends.openvino.strings import as_fixed_width


class OpenVinoBackend:
    """Models that OpenVINO can read."""

    name = "openvino"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        The model is left in the context for ``open``. Raises ``NeriteError``.
        """
        if not completion.is_needed(context):
            return context.config
        source = plan.source(context)
        model = context.memo[source] = reading.read(source)
        config = dict(context.config)
        if not batching(config) and fitting.has_batch_layout(model):
            # Fitted with any batch size, the model tells how it is with a free batch.
            config["max_batch_size"] = 1
        fitted = model.clone()
        fitting.fit(fitted, context, config)
        return completion.complete(context, graph.of_model(fitted, config))

    def open(self, context: ModelContext) -> OpenVinoModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return OpenVinoModel(context)


class OpenVinoModel:
    """An open model: compiled once for all instances that have the same cores, each with an infer request of its own.

    The weights are in memory once for each compiled model.
    """

    def __init__(self, context: ModelContext) -> None:
        source = plan.source(context)
        self._name = context.name
        self._core = framework.core(source.extension)
        self._plan = plan.make(context, _supported(self._core, plan.device(context)))
        self._model = context.memo.pop(source, None) or reading.read(source)
        config = context.config
        fitting.fit(self._model, context, config)
        found = graph.of_model(self._model, config)
        self._face = face.of_graph(context, found, as_fixed_width)
        self._inputs, self._outputs = list(found.inputs), list(found.outputs)
        self._rows = 0
        if batching(config) and properties.flag(context, "ENABLE_BATCH_PADDING"):
            self._rows = int(config["max_batch_size"])
            fitting.pad(self._model, config)
        self._lock = threading.Lock()
        self._compiled: dict[CompilePlan, Any] = {}

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance, compiling the model if it is the first of its kind. Raises ``NeriteError``."""
        compiled = self._compile(plan.of_instance(self._plan, self._name, context))
        return self._face.instance(Inference(compiled, self._inputs, self._outputs, self._rows))

    def close(self) -> None:
        """Let go of the model, which has its weights mapped, and of what was compiled; that ends with its instances."""
        self._compiled.clear()
        self._model = None

    def _compile(self, wanted: CompilePlan) -> Any:
        with self._lock:
            if wanted not in self._compiled:
                try:
                    self._compiled[wanted] = self._core.compile_model(
                        self._model, wanted.device, dict(wanted.properties)
                    )
                except Exception as error:  # Whatever the framework raises says why the model cannot be compiled.
                    raise framework.translated(error, "loading model", _remedy(self._core, wanted.device)) from error
            return self._compiled[wanted]


def _supported(core: Any, device: str) -> frozenset[str]:
    """Return the properties of a device that may be set. Raises ``NeriteError`` for a device that is not there."""
    try:
        found = core.get_property(device.partition(":")[0], "SUPPORTED_PROPERTIES")
    except Exception as error:  # Whatever the framework raises says why it cannot use the device.
        raise framework.translated(error, "configuring openvino core", _remedy(core, device)) from error
    return frozenset(name for name, access in found.items() if access != "RO")


def _remedy(core: Any, device: str) -> str:
    """Return what to do about a device that is not there; nothing, if it is."""
    available = core.available_devices
    if any(device.partition(".")[0] in (name, name.partition(".")[0]) for name in available) or ":" in device:
        return ""
    return f"TARGET_DEVICE may be one of: {', '.join(available)}"
