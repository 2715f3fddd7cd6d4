"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from nerite.backends.arrays import completion, face
from nerite.backends.arrays.instance import ArrayInstance
from nerite.backends.arrays.strings import as_text
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.onnxruntime import graph, plan, providers, runs, session
from nerite.backends.onnxruntime.plan import SessionPlan
from nerite.backends.values import flag


class OnnxRuntimeBackend:
    """ONNX models, on ONNX Runtime."""

    name = "onnxruntime"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        The session that this takes is left in the context for ``open``. Raises ``NeriteError``.
        """
        if not completion.is_needed(context):
            return context.config
        wanted = plan.make(context, plan.first_instance(context))
        opened = context.memo[wanted] = session.open_session(wanted)
        return completion.complete(context, graph.of_session(opened))

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
        wanted = plan.make(context, plan.first_instance(context))
        self._run_entries = plan.run_entries(context, wanted)
        opened = context.memo.pop(wanted, None) or session.open_session(wanted)
        self._context = context
        self._plan = wanted
        self._graph = graph.of_session(opened)
        self._face = face.of_graph(context, self._graph, as_text)
        key = "share_session_between_instances"
        self._share = flag(context, key, default=False) if context.parameter(key) else None
        self._lock = threading.Lock()
        self._spare: dict[SessionPlan, Any] = {wanted: opened}

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance, with a session of its own or a shared one. Raises ``NeriteError``."""
        run_options = session.run_options(self._run_entries)
        return self._face.instance(runs.of_session(self._session(context), self._graph, run_options))

    def close(self) -> None:
        """Let go of the sessions; they end with the last response that holds an array of theirs."""
        self._spare.clear()

    def _session(self, context: InstanceContext) -> Any:
        # Not a new plan: the file may be another one by now, and all instances are of one model.
        wanted = plan.of_instance(self._plan, self._context, context)
        share = wanted.providers == (providers.CPU,) if self._share is None else self._share
        with self._lock:
            if not share:
                return self._spare.pop(wanted, None) or session.open_session(wanted)
            if wanted not in self._spare:
                self._spare[wanted] = session.open_session(wanted)
            return self._spare[wanted]
