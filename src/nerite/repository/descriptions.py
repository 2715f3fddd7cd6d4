"""What there is to tell of the models: tensors, configurations, counts. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nerite.core.engine_report import EngineReport
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.models.running_version import RunningVersion
from nerite.observability import custom_metrics
from nerite.observability.custom_metrics import Reading
from nerite.observability.model_metrics import MeteredVersion
from nerite.observability.statistics import memory_json, statistics_json
from nerite.repository.catalogue import ModelRecord, version_number
from nerite.repository.manager import ModelManager


class Descriptions:
    """Those of the models that a manager has. For the loop's thread only."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def running(self, model: str = "") -> list[RunningVersion]:
        """Return the versions that run of what a name means, ascending; none if it means nothing. Without one: all."""
        if not model:
            return [running for record in self._manager.records for running in _ascending(record)]
        try:
            return _ascending(self._manager.meant(model))
        except NeriteError:
            return []

    def metadata(self, model: str, version: str) -> dict[str, Any]:
        """Return a model's versions and signature. Raises Triton's refusals."""
        record = self._manager.meant(model)
        running = record.find(version)
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
        """Return a model's complete configuration in Triton's JSON form. Raises Triton's refusals."""
        return self._manager.find(model, version).config_json

    def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of a model's ready versions; of all models if ``model`` is empty.

        Raises Triton's refusals.
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
        """Yield every version that runs now as the metrics page reads it, when its turn comes."""
        versions = [(record.namespace, running) for record in self._manager.records for running in _ascending(record)]
        for namespace, running in versions:
            yield MeteredVersion(
                running.name,
                running.label,
                namespace,
                running.config.metric_tags,
                running.statistics,
                running.pending,
                running.load_seconds,
                running.restarts,
                running.memory,
                running.waiting,
                {why.value: count for why, count in running.releases.items()},
                max(running.config.max_batch_size, 1),
                running.cached,
                running.tokens,
            )

    def instances(self) -> Iterator[dict[str, Any]]:
        """Yield each instance of the versions that run now, when its turn comes: where it is and how it does."""
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
        """Return what models count themselves, by process: some are in one. No response is there without its counts."""
        instances = [instance for running in self.running() for instance in running.instances]
        processes = {instance.metrics for instance in instances if instance.metrics is not None}
        await custom_metrics.complete(processes)
        return custom_metrics.of_this_process() + [reading for each in processes for reading in each.readings]

    def engine_reports(self, model: str) -> list[EngineReport]:
        """Return how the engines of a model are, or of all models if ``model`` is empty: none where there are none."""
        return [latest for version in self.running(model) if version.tokens for latest in version.tokens.latest]


def _ascending(record: ModelRecord) -> list[RunningVersion]:
    return [record.running[number] for number in sorted(record.running)]
