"""Data that a server returns about its models: index, metadata, statistics, metrics and chat completions."""

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
    """Entry of the repository index. A model that was never loaded has neither version nor state."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    content_hash: str = ""
    """Hash of the served files, if the server reports it."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> ModelVersion:
        """Parse an entry of the index."""
        return cls(*(str(entry.get(name, "")) for name in ("name", "version", "state", "reason", "content_hash")))


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """An input or an output. In its shape -1 means any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> TensorDescription:
        """Parse an entry of a model's metadata. Some servers send sizes as strings."""
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
        """Parse the metadata that a server sent."""
        return cls(
            name=str(document["name"]),
            versions=tuple(map(str, document.get("versions", ()))),
            platform=str(document.get("platform", "")),
            inputs=tuple(map(TensorDescription.read, document.get("inputs", ()))),
            outputs=tuple(map(TensorDescription.read, document.get("outputs", ()))),
        )

    @property
    def generates_text(self) -> bool:
        """True for a language model: it takes ``text_input`` and returns ``text_output``, and is no embedding."""
        inputs = {tensor.name for tensor in self.inputs if tensor.datatype == "BYTES"}
        outputs = {tensor.name: tensor.datatype for tensor in self.outputs}
        return "text_input" in inputs and outputs.get("text_output") == "BYTES" and "embedding" not in outputs


@dataclass(frozen=True, slots=True)
class DurationCount:
    """Number of occurrences of something, and their total duration."""

    count: int = 0
    ns: int = 0

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> DurationCount:
        """Parse a duration that a server sent."""
        return cls(int(entry.get("count", 0)), int(entry.get("ns", 0)))

    @property
    def mean_ms(self) -> float:
        """Mean duration in milliseconds; 0 without occurrences."""
        return self.ns / self.count / 1e6 if self.count else 0.0

    def __sub__(self, earlier: DurationCount) -> DurationCount:
        return DurationCount(self.count - earlier.count, self.ns - earlier.ns)


_MEASURES = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Statistics of a model version. An inference is an element of a batch, an execution is a batch."""

    name: str
    version: str
    last_inference: int
    """Time of the last request, in milliseconds since the epoch; 0 for never."""
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
        """Parse an entry of the statistics that a server sent."""
        measured = entry.get("inference_stats", {})
        measures = {name: DurationCount.read(measured.get(name, {})) for name in _MEASURES}
        counted = {name: int(entry.get(name, 0)) for name in ("last_inference", "inference_count", "execution_count")}
        values: dict[str, Any] = {**counted, **measures}
        return cls(name=str(entry["name"]), version=str(entry.get("version", "")), **values)

    @property
    def requests(self) -> int:
        """Number of requests that were answered, with a result or with an error."""
        return self.success.count + self.fail.count

    @property
    def mean_compute_ms(self) -> float:
        """Mean compute time of a request: inputs, execution and outputs."""
        ns = self.compute_input.ns + self.compute_infer.ns + self.compute_output.ns
        return DurationCount(self.compute_infer.count, ns).mean_ms

    @property
    def mean_batch(self) -> float:
        """The mean size of a batch; 0 if nothing was executed."""
        return self.inference_count / self.execution_count if self.execution_count else 0.0

    def since(self, earlier: ModelStatistics | None) -> ModelStatistics:
        """Return the difference to ``earlier``; everything if that is None or the server has been restarted since."""
        if earlier is None or earlier.requests > self.requests or earlier.inference_count > self.inference_count:
            return self
        counted = ("inference_count", "execution_count", *_MEASURES)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ModelStatistics(**{**values, **{name: values[name] - getattr(earlier, name) for name in counted}})


Labels: TypeAlias = Mapping[str, str]
Sample: TypeAlias = tuple[Labels, float]

_NAME: Final = re.compile(r"[A-Za-z_:][\w:]*")
_SAMPLE: Final = re.compile(r"[A-Za-z_:][\w:]*(?:\{(.*?)\})? ([+-]?(?:\.?\d\S*|Inf|NaN))(?: .*)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")


class MetricsPage:
    """Samples of a metrics page in Prometheus's text format, by name.

    Lines are parsed lazily when their name is queried: the page for a thousand models has 160,000 lines, of which few
    are needed.
    """

    def __init__(self, text: str) -> None:
        """Index the lines of a page. Lines that are not samples are ignored."""
        self._lines: dict[str, list[str]] = defaultdict(list)
        for line in text.split("\n"):
            name = _NAME.match(line)
            if name is not None:
                self._lines[name[0]].append(line)
        self._samples: dict[str, dict[str | None, list[Sample]]] = {}
        """Parsed samples of the names that were queried, by the label ``model``."""

    def samples(self, name: str) -> Iterator[Sample]:
        """Yield labels and value of each sample with this name."""
        for samples in self._by_model(name).values():
            yield from samples

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples that have all of ``labels``; None if there are none."""
        found = [value for _, value in self._matching(name, labels)]
        return sum(found) if found else None

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return the cumulative counts of a histogram by upper bound, summed over all samples that have ``labels``."""
        found: dict[float, float] = defaultdict(float)
        for given, value in self._matching(f"{name}_bucket", labels):
            found[float(given["le"])] += value
        return dict(sorted(found.items()))

    def _matching(self, name: str, labels: Labels) -> Iterator[Sample]:
        """Yield the samples that have all of ``labels``."""
        candidates = self._by_model(name).get(labels["model"], ()) if "model" in labels else self.samples(name)
        return (sample for sample in candidates if labels.items() <= sample[0].items())

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
    """Estimate the quantile ``part`` of a histogram; None if it is empty.

    Like Prometheus, interpolate linearly within a bucket, and return the last finite bound for values above it.
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


@dataclass(frozen=True, slots=True)
class CompletionPart:
    """Part of a streamed chat completion. Fields that the event lacks are empty."""

    text: str = ""
    finish_reason: str = ""
    """Why generation ended, such as ``stop`` or ``length``; empty before the end."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @classmethod
    def read(cls, chunk: Mapping[str, Any]) -> CompletionPart:
        """Parse a chunk of a chat completion; only its first choice is used."""
        choice: Mapping[str, Any] = next(iter(chunk.get("choices") or ()), {})
        usage = chunk.get("usage") or {}
        text = (choice.get("delta") or {}).get("content") or ""
        reason = choice.get("finish_reason") or ""
        return cls(text, reason, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def completion_parts(lines: Iterable[bytes]) -> Iterator[CompletionPart]:
    """Parse the lines of an event stream. Raises ``ClientError`` for an error event or an invalid event."""
    for line in lines:
        event = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or event == b"[DONE]":
            continue
        try:
            chunk = json.loads(event)
            part = None if "error" in chunk else CompletionPart.read(chunk)
        except (ValueError, TypeError, AttributeError) as error:
            raise ClientError(f"the server's answer is not a chat completion: {error}", 200) from error
        if part is None:
            raise ClientError(text_in(chunk["error"]), 200)
        yield part
