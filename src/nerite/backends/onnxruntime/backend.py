"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.onnxruntime import agreement, completion, graph, plan, ports, providers, runs, session
from nerite.backends.onnxruntime.call import Calls
from nerite.backends.onnxruntime.instance import OnnxInstance
from nerite.backends.onnxruntime.plan import SessionPlan
from nerite.backends.onnxruntime.ragged import Ragged
from nerite.backends.onnxruntime.selection import Selections
from nerite.backends.onnxruntime.values import boolean, integer
from nerite.backends.sequence_tensors import control_inputs, state_inputs, state_outputs

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"


class OnnxRuntimeBackend:
    """ONNX models, on ONNX Runtime."""

    name = "onnxruntime"

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        The session that this takes is left in the context for ``open``. Raises ``NeriteError``.
        """
        if not completion.is_needed(context.name, context.config):
            return context.config
        wanted = plan.make(context, plan.first_instance(context))
        opened = context.memo[wanted] = session.open_session(wanted)
        default = integer(context.settings.get("default-max-batch-size", str(completion.DEFAULT_MAX_BATCH_SIZE)))
        return completion.complete(context.name, context.config, graph.of_session(opened), default)

    def open(self, context: ModelContext) -> OnnxModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return OnnxModel(context)


class OnnxModel:
    """An open model: its sessions, and what its instances have in common.

    Instances on a CPU share one session. ONNX Runtime allows that, it answers as many requests as one session for each
    (see ``benchmarks/onnx_backend.py``), and the weights are in memory once. Instances on accelerators get one each,
    as some providers let only one thread in. ``share_session_between_instances`` decides otherwise.
    """

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        wanted = plan.make(context, plan.first_instance(context))
        opened = context.memo.pop(wanted, None) or session.open_session(wanted)
        self._context = context
        self._plan = wanted
        self._graph = graph.of_session(opened)
        agreement.check(context.name, config, self._graph)
        self._share = context.parameter("share_session_between_instances")
        self._lock = threading.Lock()
        self._spare: dict[SessionPlan, Any] = {wanted: opened}
        self._batching = int(config.get("max_batch_size", 0)) > 0
        takes = {**self._graph.inputs, **self._graph.defaulted}
        inputs = {
            entry["name"]: ports.of_entry(entry, takes[entry["name"]], self._batching)
            for entry in (*config["input"], *control_inputs(config), *state_inputs(config))
        }
        outputs = [
            ports.of_entry(entry, self._graph.outputs[entry["name"]], self._batching)
            for entry in (*config["output"], *state_outputs(config))
        ]
        self._selections = Selections(context.name, str(context.version), outputs)
        self._calls = Calls(inputs, self._selections)

    def instance(self, context: InstanceContext) -> OnnxInstance:
        """Make an instance, with a session of its own or a shared one. Raises ``NeriteError``."""
        shrinkage = self._context.parameter(_SHRINKAGE)
        return OnnxInstance(
            runs.of_session(self._session(context), self._graph),
            session.run_options({_SHRINKAGE: shrinkage} if shrinkage else {}),
            self._calls,
            self._selections,
            Ragged(self._context.config),
            self._batching,
        )

    def close(self) -> None:
        """Let go of the sessions; they end with the last response that holds an array of theirs."""
        self._spare.clear()

    def _session(self, context: InstanceContext) -> Any:
        # Not a new plan: the file may be another one by now, and all instances are of one model.
        wanted = plan.of_instance(self._plan, self._context, context)
        share = boolean(self._share) if self._share else wanted.providers == (providers.CPU,)
        with self._lock:
            if not share:
                return self._spare.pop(wanted, None) or session.open_session(wanted)
            if wanted not in self._spare:
                self._spare[wanted] = session.open_session(wanted)
            return self._spare[wanted]
