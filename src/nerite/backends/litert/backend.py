"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from nerite.backends.arrays import completion, face
from nerite.backends.arrays.graph import Graph
from nerite.backends.arrays.instance import ArrayInstance
from nerite.backends.arrays.strings import as_bytes
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.litert import computation, plan, session, tensors
from nerite.backends.litert.plan import InterpreterPlan
from nerite.backends.litert.tensors import Tensors

_log = logging.getLogger("nerite.backends.litert")


class LiteRtBackend:
    """TensorFlow Lite models, on LiteRT."""

    name = "litert"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        Raises ``NeriteError``.
        """
        if not completion.is_needed(context):
            return context.config
        interpreter = session.open_interpreter(plan.make(context, plan.first_instance(context)))
        return completion.complete(context, _graph(context, interpreter, _tensors(context, interpreter)))

    def open(self, context: ModelContext) -> LiteRtModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return LiteRtModel(context)


class LiteRtModel:
    """An open model. Each instance has an interpreter of its own, the first the one that the model was read with."""

    def __init__(self, context: ModelContext) -> None:
        wanted = plan.make(context, plan.first_instance(context))
        interpreter = session.open_interpreter(wanted)
        found = _tensors(context, interpreter)
        self._context = context
        self._face = face.of_graph(context, _graph(context, interpreter, found), as_bytes)
        self._lock = threading.Lock()
        self._spare: dict[InterpreterPlan, Any] = {wanted: interpreter}
        for line in tensors.quantisation(found):
            _log.info("'%s' is quantised: %s", context.name, line)

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance with an interpreter of its own. Raises ``NeriteError``."""
        wanted = plan.make(self._context, context)
        with self._lock:
            interpreter = self._spare.pop(wanted, None)
            # One for other cores or threads is nobody's, and holds a copy of the weights.
            self._spare.clear()
        if interpreter is None:
            interpreter = session.open_interpreter(wanted)
        return self._face.instance(computation.of_interpreter(interpreter, _tensors(self._context, interpreter)))

    def close(self) -> None:
        """Let go of an interpreter that no instance wanted."""
        self._spare.clear()


def _tensors(context: ModelContext, interpreter: Any) -> Tensors:
    return tensors.of_interpreter(interpreter, context.name, context.config, context.parameter("SIGNATURE"))


def _graph(context: ModelContext, interpreter: Any, found: Tensors) -> Graph:
    graph = tensors.graph_of(found)
    rows = int(context.config.get("max_batch_size", 0))
    return tensors.with_rows(graph, interpreter, found, rows) if rows else graph
