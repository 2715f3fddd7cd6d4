"""What a server says of its models: versions and their states, and the tensors of one."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

from nerite.client.connection import ClientError, text_in


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A line of the repository index. A model that was never loaded has neither version nor state."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    content_hash: str = ""
    """Of the files that are served, from servers that tell it."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> ModelVersion:
        """Read an entry of the index."""
        return cls(*(str(entry.get(name, "")) for name in ("name", "version", "state", "reason", "content_hash")))


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """An input or an output. In its shape -1 stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> TensorDescription:
        """Read an entry of a model's metadata. Some servers write sizes as texts."""
        return cls(str(entry["name"]), str(entry["datatype"]), tuple(int(size) for size in entry["shape"]))

    def __str__(self) -> str:
        return f"{self.name} ({self.datatype} {list(self.shape)})"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The metadata of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ModelDescription:
        """Read the metadata that a server sent."""
        return cls(
            name=str(document["name"]),
            versions=tuple(map(str, document.get("versions", ()))),
            platform=str(document.get("platform", "")),
            inputs=tuple(map(TensorDescription.read, document.get("inputs", ()))),
            outputs=tuple(map(TensorDescription.read, document.get("outputs", ()))),
        )


# What a server has counted about a version of a model, and what follows from it.


@dataclass(frozen=True, slots=True)
class DurationCount:
    """How often something happened, and how long it took in all."""

    count: int = 0
    ns: int = 0

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> DurationCount:
        """Read a duration that a server sent."""
        return cls(int(entry.get("count", 0)), int(entry.get("ns", 0)))

    @property
    def mean_ms(self) -> float:
        """How long it took on average; 0 if it never happened."""
        return self.ns / self.count / 1e6 if self.count else 0.0

    def __sub__(self, earlier: DurationCount) -> DurationCount:
        return DurationCount(self.count - earlier.count, self.ns - earlier.ns)


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
    success: DurationCount
    fail: DurationCount
    queue: DurationCount
    compute_input: DurationCount
    compute_infer: DurationCount
    compute_output: DurationCount
    cache_hit: DurationCount
    cache_miss: DurationCount

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> ModelStatistics:
        """Read an entry of the statistics that a server sent."""
        measured = entry.get("inference_stats", {})
        measures = {name: DurationCount.read(measured.get(name, {})) for name in _MEASURES}
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
        return DurationCount(self.compute_infer.count, ns).mean_ms

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


# A page of metrics in Prometheus's text format, as a server shows it on its metrics port.

Labels: TypeAlias = Mapping[str, str]
Sample: TypeAlias = tuple[Labels, float]

_NAME: Final = re.compile(r"[A-Za-z_:][\w:]*")
_SAMPLE: Final = re.compile(r"[A-Za-z_:][\w:]*(?:\{(.*?)\})? ([+-]?(?:\.?\d\S*|Inf|NaN))(?: .*)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")


class MetricsPage:
    """The samples of a page, by their names.

    That of a thousand models has 160,000 lines, of which nobody wants all: a line is read when its name is asked for.
    """

    def __init__(self, text: str) -> None:
        """Take a page. What is no sample is passed over."""
        self._lines: dict[str, list[str]] = defaultdict(list)
        for line in text.split("\n"):
            name = _NAME.match(line)
            if name is not None:
                self._lines[name[0]].append(line)
        self._samples: dict[str, dict[str | None, list[Sample]]] = {}
        """Of the names that were asked for, by the label ``model``."""

    def samples(self, name: str) -> Iterator[Sample]:
        """Yield labels and value of each sample with this name."""
        for of_model in self._by_model(name).values():
            yield from of_model

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of those that have all of ``labels``; None if there are none."""
        found = [value for _, value in self._having(name, labels)]
        return sum(found) if found else None

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return of a histogram how many values do not exceed each bound, of all that have ``labels`` together."""
        found: dict[float, float] = defaultdict(float)
        for given, value in self._having(f"{name}_bucket", labels):
            found[float(given["le"])] += value
        return dict(sorted(found.items()))

    def _having(self, name: str, labels: Labels) -> Iterator[Sample]:
        """Yield the samples that have all of ``labels``."""
        of_one = self._by_model(name).get(labels["model"], ()) if "model" in labels else self.samples(name)
        return (sample for sample in of_one if labels.items() <= sample[0].items())

    def _by_model(self, name: str) -> dict[str | None, list[Sample]]:
        known = self._samples.get(name)
        if known is None:
            known = self._samples[name] = defaultdict(list)
            for line in self._lines.pop(name, ()):
                found = _SAMPLE.fullmatch(line)
                if found is not None:
                    labels = _labels(found[1] or "")
                    known[labels.get("model")].append((labels, float(found[2])))
        return known


def _labels(text: str) -> Labels:
    return {name: _ESCAPE.sub(_unescaped, value) for name, value in _LABEL.findall(text)}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def quantile(buckets: Mapping[float, float], part: float) -> float | None:
    """Return the value that ``part`` of those in a histogram do not exceed, as near as its bounds tell; None if empty.

    Within a bucket values count as spread evenly, as Prometheus has it. What lies above the last bound counts as that.
    """
    whole = max(buckets.values(), default=0.0)
    if not whole:
        return None
    wanted, lower, before = part * whole, 0.0, 0.0
    for bound, count in buckets.items():
        if count >= wanted and count > before:
            return lower if bound == float("inf") else lower + (bound - lower) * (wanted - before) / (count - before)
        lower, before = bound, count
    return lower


# What a text model writes under ``/v1``, part by part: OpenAI's events to plain data.


@dataclass(frozen=True, slots=True)
class CompletionPart:
    """What has come of an answer. What it does not tell is empty."""

    text: str = ""
    finish_reason: str = ""
    """Why there is no more: ``stop``, ``length``; empty while more comes."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @classmethod
    def read(cls, chunk: Mapping[str, Any]) -> CompletionPart:
        """Read a chunk of a chat completion; of its choices the first."""
        choice: Mapping[str, Any] = next(iter(chunk.get("choices") or ()), {})
        usage = chunk.get("usage") or {}
        text = (choice.get("delta") or {}).get("content") or ""
        reason = choice.get("finish_reason") or ""
        return cls(text, reason, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def completion_parts(lines: Iterable[bytes]) -> Iterator[CompletionPart]:
    """Read the lines of an event stream. Raises ``ClientError`` for an event that is an error, or none at all."""
    for line in lines:
        event = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or event == b"[DONE]":
            continue
        try:
            chunk = json.loads(event)
            part = None if "error" in chunk else CompletionPart.read(chunk)
        except (ValueError, TypeError, AttributeError) as error:
            raise ClientError(f"the server's answer is no chat completion: {error}", 200) from error
        if part is None:
            raise ClientError(text_in(chunk["error"]), 200)
        yield part
