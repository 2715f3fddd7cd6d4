"""What a server has counted about a version of a model, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Measure:
    """How often something happened, and how long it took in all."""

    count: int = 0
    ns: int = 0

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Measure:
        """Read a duration that a server sent."""
        return cls(int(entry.get("count", 0)), int(entry.get("ns", 0)))

    @property
    def mean_ms(self) -> float:
        """How long it took on average; 0 if it never happened."""
        return self.ns / self.count / 1e6 if self.count else 0.0

    def __sub__(self, earlier: Measure) -> Measure:
        return Measure(self.count - earlier.count, self.ns - earlier.ns)


_MEASURES = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The statistics of a version. An inference is an element of a batch, an execution is a batch."""

    name: str
    version: str
    last_inference: int
    """When the last request came, in milliseconds since 1970; 0 for never."""
    inference_count: int
    execution_count: int
    success: Measure
    fail: Measure
    queue: Measure
    compute_input: Measure
    compute_infer: Measure
    compute_output: Measure
    cache_hit: Measure
    cache_miss: Measure

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> ModelStatistics:
        """Read an entry of the statistics that a server sent."""
        measured = entry.get("inference_stats", {})
        measures = {name: Measure.read(measured.get(name, {})) for name in _MEASURES}
        counted = {name: int(entry.get(name, 0)) for name in ("last_inference", "inference_count", "execution_count")}
        values: dict[str, Any] = {**counted, **measures}
        return cls(name=str(entry["name"]), version=str(entry.get("version", "")), **values)

    @property
    def requests(self) -> int:
        """Requests that were answered, with a result or with an error."""
        return self.success.count + self.fail.count

    @property
    def mean_compute_ms(self) -> float:
        """How long a request was computed on average: inputs, execution and outputs."""
        ns = self.compute_input.ns + self.compute_infer.ns + self.compute_output.ns
        return Measure(self.compute_infer.count, ns).mean_ms

    @property
    def mean_batch(self) -> float:
        """The mean size of a batch; 0 if nothing was executed."""
        return self.inference_count / self.execution_count if self.execution_count else 0.0

    def since(self, earlier: ModelStatistics | None) -> ModelStatistics:
        """Return what has happened since ``earlier``: everything if the server has begun anew, or None is given."""
        if earlier is None or earlier.requests > self.requests or earlier.inference_count > self.inference_count:
            return self
        counted = ("inference_count", "execution_count", *_MEASURES)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ModelStatistics(**{**values, **{name: values[name] - getattr(earlier, name) for name in counted}})
