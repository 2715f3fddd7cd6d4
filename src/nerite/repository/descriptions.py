"""Read-only views of the models: metadata, configurations, statistics, metrics, engine reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nerite.core.engine_report import EngineReport
from nerite.core.errors import InvalidArgument, NeriteError, NotLoaded
from nerite.models.running_version import RunningVersion
from nerite.observability import custom_metrics
from nerite.observability.custom_metrics import Reading, ReportedMetrics
from nerite.observability.model_metrics import MeteredVersion
from nerite.observability.statistics import memory_json, statistics_json
from nerite.repository.catalogue import ModelRecord, version_number
from nerite.repository.manager import ModelManager


class Descriptions:
    """Describes the models of a manager. For the loop's thread only."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self._last: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        """Metadata and configuration as of the last load, of models that are loaded on demand."""

    def remember(self, model: str) -> None:
        """Keep the description of a model that is loaded on demand, for when it is not loaded."""
        self._last[model] = self.metadata(model, ""), self.config(model, "")

    def _remembered(self, model: str, version: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is known of a model that is not loaded. Raises ``NotLoaded`` if it is not known."""
        last = self._last.get(model)
        if last is not None and (not version or last[0]["versions"] == [version]):
            return last
        self._manager.find(model, version)
        raise NotLoaded.of(model)

    def running(self, model: str = "") -> list[RunningVersion]:
        """Return the running versions of a model, ascending; none if unknown; those of all models without a name."""
        if not model:
            return [running for record in self._manager.records for running in _ascending(record)]
        try:
            return _ascending(self._manager.meant(model))
        except NeriteError:
            return []

    def metadata(self, model: str, version: str) -> dict[str, Any]:
        """Return a model's versions and signature. Raises Triton's errors."""
        record = self._manager.meant(model)
        if record.on_demand and not record.running:
            return self._remembered(model, version)[0]
        running = self._manager.find(model, version)
        batch = [-1] if running.config.max_batch_size > 0 else []

        def tensors(declared: Any) -> list[dict[str, Any]]:
            return [
                {"name": item.name, "datatype": item.datatype.name, "shape": [*batch, *item.dims]} for item in declared
            ]

        return {
            "name": model,
            "versions": [running.label] if version else [str(number) for number in sorted(record.running)],
            "platform": running.config.platform or running.config.backend,
            "inputs": tensors(running.signature.inputs.values()),
            "outputs": tensors(running.signature.outputs.values()),
        }

    def config(self, model: str, version: str) -> dict[str, Any]:
        """Return a model's complete configuration in Triton's JSON form. Raises Triton's errors."""
        record = self._manager.meant(model)
        if record.on_demand and not record.running:
            return self._remembered(model, version)[1]
        return self._manager.find(model, version).config_json

    def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of a model's ready versions; of all models if ``model`` is empty.

        Raises Triton's errors.
        """
        running = self.running(model)
        if model:
            if not running:
                raise InvalidArgument(f"requested model '{model}' is not available")
            if version:
                number = version_number(version)
                running = [item for item in running if item.version == number]
                if not running:
                    raise InvalidArgument(f"requested model version is not available for model '{model}'")
        return [
            {
                "name": item.name,
                "version": item.label,
                **statistics_json(item.statistics, decoupled=item.decoupled),
                "memory_usage": memory_json(item.memory),
            }
            for item in running
        ]

    def metrics(self) -> Iterator[MeteredVersion]:
        """Lazily yield the metrics of every version that runs now."""
        versions = [(record.namespace, running) for record in self._manager.records for running in _ascending(record)]
        for namespace, running in versions:
            memory, source = _memory_of(running)
            yield MeteredVersion(
                running.name,
                running.label,
                namespace,
                running.config.metric_tags,
                running.statistics,
                running.pending,
                running.load_seconds,
                running.restarts,
                memory,
                running.waiting,
                {why.value: count for why, count in running.releases.items()},
                max(running.config.max_batch_size, 1),
                running.cached,
                running.tokens,
                source,
            )

    def instances(self) -> Iterator[dict[str, Any]]:
        """Lazily yield process, state and memory of each instance of the running versions."""
        for running in self.running():
            for instance in running.instances:
                pid, since = instance.process() or (None, None)
                yield {
                    "model": running.name,
                    "version": running.label,
                    "instance": instance.name,
                    "usable": instance.usable,
                    "busy": instance.busy,
                    "reason": "" if instance.failure is None else instance.failure.message,
                    "pid": pid,
                    "since": since,
                    "memory": instance.memory(),
                    "restarts": instance.restarts,
                }

    async def custom_metrics(self) -> list[Reading]:
        """Return the metrics that models define themselves, one reading per process, which instances may share.

        They include the counts of every response that has been returned, and what executions have counted so far.
        """
        processes: dict[ReportedMetrics, bool] = {}
        for running in self.running():
            for instance in running.instances:
                if instance.metrics is not None:
                    processes[instance.metrics] = instance.busy or processes.get(instance.metrics, False)
        await custom_metrics.complete(processes)
        return custom_metrics.of_this_process() + [reading for each in processes for reading in each.readings]

    def engine_reports(self, model: str) -> list[EngineReport]:
        """Return the latest reports of a model's engines, or of all engines if ``model`` is empty."""
        return [latest for version in self.running(model) if version.tokens for latest in version.tokens.latest]


def _memory_of(running: RunningVersion) -> tuple[int, str]:
    """Return the memory of a version and how it is known, as ``MeteredVersion`` has them."""
    own = running.own_memory
    if workers := running.memory:
        return workers, "workers"
    return own.size, ("files" if own.estimated else "load") if own.size else ""


def _ascending(record: ModelRecord) -> list[RunningVersion]:
    return [record.running[number] for number in sorted(record.running)]
