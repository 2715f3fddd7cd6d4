"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from nerite.backends.arrays import completion
from nerite.backends.arrays.face import Face
from nerite.backends.arrays.instance import ArrayInstance
from nerite.backends.cores import share
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.trees import artifact, parameters, ports
from nerite.backends.trees.answers import Computation
from nerite.backends.trees.engines.choice import explainer, open_engine
from nerite.backends.trees.engines.engine import Engine, Explainer
from nerite.backends.trees.engines.nvforest import NvforestEngine
from nerite.backends.trees.forest import Forest
from nerite.core.errors import Unsupported


class TreesBackend:
    """Forests of decision trees: the work of Triton's FIL backend."""

    name = "fil"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, input and output from the model.

        The forest that this takes is left in the context for ``open``. Raises ``NeriteError``.
        """
        if not completion.is_needed(context):
            return context.config
        wanted = parameters.read(context.name, context.config)
        forest = _read(context, wanted)
        context.memo[forest.description.artifact] = forest
        return completion.complete(context, ports.graph(forest.description, wanted))

    def open(self, context: ModelContext) -> TreesModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return TreesModel(context)


class TreesModel:
    """An open model. Its instances share one engine for each number of threads that they compute with."""

    def __init__(self, context: ModelContext) -> None:
        self._name = context.name
        self._parameters = parameters.read(context.name, context.config)
        self._unused: Forest | None = _read(context, self._parameters)
        self._forest = self._unused.description
        self._ports = ports.agreed(context.name, context.config, self._forest, self._parameters)
        self._face = Face(context, [self._ports.taken], self._ports.given)
        self._lock = threading.Lock()
        self._engines: dict[tuple[str, int], Engine] = {}

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance. Raises ``NeriteError`` where its engine is not installed, or cannot load the model."""
        with self._lock:
            engine = self._engine(context)
        return self._face.instance(Computation(engine, self._ports, self._parameters, self._forest.features))

    def close(self) -> None:
        """Let go of the engines; they end with the last instance that has one."""
        self._engines.clear()
        self._unused = None

    def _engine(self, context: InstanceContext) -> Engine:
        threads = self._parameters.threads or share(context)
        key = ("GPU", context.device) if context.kind == "GPU" else ("CPU", threads)
        engine = self._engines.get(key)
        if engine is None:
            self._forest.artifact.check_same(self._name)
            if context.kind == "GPU":
                engine = NvforestEngine(self._name, self._forest, self._parameters, context.device)
            else:
                engine = open_engine(self._name, self._forest, self._parameters.engine, threads, self._read)
            self._check_explains(engine)
            self._engines[key] = engine
            # Where another library computes, the trees need not be in memory twice.
            self._unused = None
        return engine

    def _read(self) -> Forest:
        allow = self._parameters.allow_unknown_field
        return self._unused or Forest(self._name, self._forest.artifact, allow_unknown_field=allow)

    def _check_explains(self, engine: Engine) -> None:
        if isinstance(engine, Explainer) or all(port.name != ports.SHAP for port in self._ports.given):
            return
        able = explainer(self._forest)
        remedy = f"{able} does: pip install {able}, and KIND_CPU" if able else "Only XGBoost and LightGBM do, of theirs"
        raise Unsupported(
            f"model '{self._name}' has the output '{ports.SHAP}', and {engine.name} does not explain predictions. "
            f"{remedy}"
        )


def _read(context: ModelContext, wanted: parameters.Parameters) -> Forest:
    found = artifact.find(context, wanted.model_type)
    kept: Forest | None = context.memo.pop(found, None)
    return kept or Forest(context.name, found, allow_unknown_field=wanted.allow_unknown_field)
