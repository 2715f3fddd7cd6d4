"""Measures a model on a trial server, and derives settings from the measurements.

The decisions (``contest_verdict``, ``propose``) are pure functions of the measurements.
"""

from __future__ import annotations

import dataclasses
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np

from nerite.client import Client, ClientError, ModelDescription
from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelInstanceGroup, ModelParameter
from nerite.core.errors import Internal
from nerite.core.tensor import Array
from nerite.tools.bench.requests import Request

_STARTED: Final = re.compile(r"Started (HTTP|GRPCInference)Service at [^\s]+:(\d+)")
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 10.0
_LOAD_SECONDS: Final = 1800.0
_FLAGS: Final = (
    "--model-control-mode=explicit",
    "--http-address=127.0.0.1",
    "--http-port=0",
    "--grpc-address=127.0.0.1",
    "--grpc-port=0",
    "--allow-metrics=false",
)
_SERVER_VARIABLES: Final = ("NERITE_", "AIP_", "SAGEMAKER_")
"""Prefixes of environment variables that configure servers, and must not affect the trial server."""


class TrialServer:
    """A server process for trying models, with its own port. A context manager that terminates the process on exit."""

    def __init__(self, repository: Path, *, grpc: bool = False) -> None:
        """``grpc``: also serve gRPC, at ``grpc_url``."""
        self.repository = repository
        self._grpc = grpc
        self._log: deque[str] = deque(maxlen=200)
        self._ports: dict[str, str] = {}
        self._started = threading.Event()

    def __enter__(self) -> TrialServer:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_SERVER_VARIABLES)}
        flags = (*_FLAGS, f"--allow-grpc={str(self._grpc).lower()}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nerite.cli.main", "serve", str(self.repository), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
            # Ctrl-C must not reach the server; this process terminates it.
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, name="trial", daemon=True)
        self._listener.start()
        self._started.wait(_START_SECONDS)
        if "HTTP" not in self._ports:
            self.__exit__(None, None, None)
            raise Internal("the trial server did not start:\n" + "\n".join(self._log))
        self.url = f"127.0.0.1:{self._ports['HTTP']}"
        # The gRPC port is opened before the HTTP port.
        self.grpc_url = f"127.0.0.1:{self._ports['GRPCInference']}" if self._grpc else ""
        self.client = Client(self.url, timeout=_LOAD_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(_STOP_SECONDS)
        if self._process.stdout is not None and not self._listener.is_alive():
            self._process.stdout.close()

    @property
    def ended(self) -> bool:
        """True if the process has exited."""
        return self._process.poll() is not None

    @property
    def last_words(self) -> str:
        """Last 20 lines of the log."""
        return "\n".join(list(self._log)[-20:])

    def memory(self) -> int:
        """Return the memory of the server and its workers in bytes, or 0 if the system does not report it."""
        total = 0
        for number in _process_tree(self._process.pid):
            try:
                lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        return total

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._log.append(line)
            if "HTTP" not in self._ports and (found := _STARTED.search(line)):
                self._ports[found[1]] = found[2]
                if found[1] == "HTTP":
                    self._started.set()
        self._started.set()


def _process_tree(ancestor: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = [ancestor]
    for number in found:
        found += children.get(number, ())
    return found


# Measurements: latency by batch size, and throughput by number of instances.

_SECONDS: Final = 0.2
"""Measuring time for each batch size; slower models still get the minimum number of runs."""
_MAX_RUNS, _MIN_RUNS, _WARM_UPS = 50, 3, 2
_SLOW: Final = 2.0
"""Latency in seconds above which no larger batch is tried."""
_CALLERS: Final = 4
_INSTANCES_SECONDS: Final = 0.3
_WORTH_TRYING: Final = 0.7
"""Larger batches are not tried once they reach less than this fraction of the best rate."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of a batch as the client sees it (median), and the compute time in it (mean, reported by the server)."""

    batch: int
    ms: float
    compute_ms: float

    @property
    def per_second(self) -> float:
        """Rows per second if batches run one after the other."""
        return self.batch / self.ms * 1000


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests per second that a number of instances answers to several concurrent clients, measured repeatedly."""

    instances: int
    rates: tuple[float, ...]

    @property
    def per_second(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.rates)

    def is_above(self, other: Throughput) -> bool:
        """Return whether every repeat exceeds every repeat of the other: a difference beyond the noise."""
        return min(self.rates) > max(other.rates)

    def __str__(self) -> str:
        return f"{self.per_second:,.0f}/s ({min(self.rates):,.0f} to {max(self.rates):,.0f}) with {self.instances}"


def latencies(
    client: Client, model: ModelDescription, largest: int, inputs: Callable[[int], Request], tell: Tell
) -> tuple[list[Latency], str]:
    """Return the latency of batches of 1, 2, 4 … rows; ``largest`` is 0 for a model without batching.

    ``inputs`` makes the inputs of a batch. Raises ``ClientError`` if the smallest batch fails; a larger one that
    fails ends the list, and its error is the second result, which is empty otherwise.
    """
    found: list[Latency] = []
    for batch in _sizes(largest):
        tell(f"measuring batches of {batch}" if largest else "measuring")
        try:
            found.append(_latency(client, model, inputs(min(batch, largest)), batch))
        except ClientError as error:
            if not found:
                raise
            return found, str(error)
        least = _WORTH_TRYING * max(each.per_second for each in found)
        # Two in a row, because a single slow one may be an outlier.
        if found[-1].ms > _SLOW * 1000 or all(each.per_second < least for each in found[-2:]):
            break
    return found, ""


def throughput(client: Client, url: str, model: ModelDescription, inputs: Request) -> float:
    """Return the requests per second that concurrent clients get."""
    counts: list[int] = []
    client.infer(model.name, inputs)
    end = time.monotonic() + _INSTANCES_SECONDS

    def send_requests() -> None:
        with Client(url) as own:
            count = 0
            while time.monotonic() < end:
                own.infer(model.name, inputs)
                count += 1
            counts.append(count)

    began = time.monotonic()
    threads = [threading.Thread(target=send_requests) for _ in range(_CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - began)


def interleaved(counts: Sequence[int], repeats: int) -> list[int]:
    """Return the order in which numbers of instances are measured: 1, 2, 2, 1, 1, 2 and so on.

    No number has an advantage if the machine's load changes, and there is a reload only where the number changes.
    """
    return [count for turn in range(repeats) for count in (counts if turn % 2 == 0 else counts[::-1])]


def by_count(measured: Sequence[tuple[int, float]]) -> list[Throughput]:
    """Return the rates of each number of instances, in ascending order of the number."""
    numbers = sorted({count for count, _ in measured})
    return [Throughput(number, tuple(rate for count, rate in measured if count == number)) for number in numbers]


def _latency(client: Client, model: ModelDescription, inputs: Request, batch: int) -> Latency:
    for _ in range(_WARM_UPS):
        began = time.perf_counter()
        client.infer(model.name, inputs)
        if time.perf_counter() - began > _SLOW:
            break
    (before,) = client.statistics(model.name, model.versions[-1])
    times: list[float] = []
    while len(times) < _MIN_RUNS or (len(times) < _MAX_RUNS and sum(times) < _SECONDS):
        began = time.perf_counter()
        client.infer(model.name, inputs)
        times.append(time.perf_counter() - began)
        if times[-1] > _SLOW:
            break
    (after,) = client.statistics(model.name, model.versions[-1])
    return Latency(batch, statistics.median(times) * 1000, after.since(before).mean_compute_ms)


def _sizes(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield max(largest, 1)


# Choice of the backend, if several can read the model's file.

_FASTER: Final = 1.15
"""Minimum speed-up for another backend to be chosen over the file's own."""
_SLOWER: Final = 0.9
"""Minimum rate of another backend at batch size 1, as a fraction of the rate of the file's own backend."""
_ALIKE: Final = 0.02
"""Maximum difference of outputs, relative to the largest value. Half precision alone accounts for up to 0.01."""
PRECISION_TOLERANCE: Final = 1e-3
"""Maximum difference between the outputs of OpenVINO's default precision and float32, relative to the largest value."""


@dataclass(frozen=True)
class Contestant:
    """A backend, its measurements, and its outputs for the same request as the other backends."""

    backend: str
    latencies: Sequence[Latency]
    answers: Mapping[str, Array]

    @property
    def best(self) -> Latency:
        """The batch with the highest rate."""
        return max(self.latencies, key=lambda each: each.per_second)


@dataclass(frozen=True)
class ContestVerdict:
    """The chosen backend, and the measurements that justify the choice."""

    winner: Contestant
    reason: str


def contest_verdict(own: Contestant, others: Sequence[Contestant]) -> ContestVerdict:
    """Return the backend to use. ``own`` is the file's own backend, and is kept unless another is clearly faster."""
    fair = [
        each for each in others if largest_difference(own.answers, each.answers) <= _ALIKE and _is_faster(own, each)
    ]
    if fair:
        winner = max(fair, key=lambda each: each.best.per_second)
        apart = largest_difference(own.answers, winner.answers)
        return ContestVerdict(
            winner, f"{_figures(winner)}; {_figures(own)}; outputs differ by {apart:.2g} of the largest value"
        )
    compared = "; ".join(
        _figures(each)
        if largest_difference(own.answers, each.answers) <= _ALIKE
        else f"{each.backend} returns different outputs"
        for each in others
    )
    return ContestVerdict(own, f"{_figures(own)}; {compared}")


def largest_difference(some: Mapping[str, Array], others: Mapping[str, Array]) -> float:
    """Return the largest difference of two sets of outputs, relative to the largest value; 1 if not comparable."""
    if some.keys() != others.keys():
        return 1.0
    return max((_difference(value, others[name]) for name, value in some.items()), default=0.0)


def _difference(some: Array, other: Array) -> float:
    if some.shape != other.shape or some.dtype != other.dtype:
        return 1.0
    if some.dtype.kind not in "fiu":
        return float(not np.array_equal(some, other))
    wide, far = some.astype(np.float64), other.astype(np.float64)
    if not np.array_equal(np.isfinite(wide), np.isfinite(far)):
        return 1.0
    finite = np.isfinite(wide)
    largest = np.abs(wide[finite]).max(initial=0.0)
    apart = np.abs(wide[finite] - far[finite]).max(initial=0.0)
    return float(apart / largest) if largest else float(apart)


def _is_faster(own: Contestant, other: Contestant) -> bool:
    gains = other.best.per_second >= _FASTER * own.best.per_second
    return gains and other.latencies[0].per_second >= _SLOWER * own.latencies[0].per_second


def _figures(contestant: Contestant) -> str:
    best = contestant.best
    alone = contestant.latencies[0]
    return f"{contestant.backend} reaches {best.per_second:,.0f}/s, and {alone.ms:.2f} ms for one request"


# Proposal of settings.

_NEARLY_BEST: Final = 0.9
"""The smallest batch with this fraction of the best rate is proposed: larger ones add latency for little gain."""
_GAIN: Final = 1.1
"""Minimum speed-up by batching that justifies its latency."""
_STANDS_OUT: Final = 1.25
"""Minimum speed-up of a preferred batch size over both neighbouring sizes."""
_INSTANCES_GAIN: Final = 1.15
"""Minimum speed-up that justifies more instances, if it also exceeds the differences between repeats."""


@dataclass(frozen=True)
class Advice:
    """A proposed value for one setting, and the measurements that justify it."""

    setting: str
    value: str
    """Empty to omit the setting."""
    reason: str


@dataclass(frozen=True)
class Proposal:
    """Proposed settings for a model: as advice for the user, and as changes to its configuration."""

    advice: tuple[Advice, ...]
    changes: Mapping[str, Any]
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the backend to set."""

    def applied(self, config: ModelConfig) -> ModelConfig:
        """Return ``config`` with these settings. Another backend does not keep the platform, which implies one."""
        platform = config.platform if self.changes.get("backend", config.backend) == config.backend else ""
        added = {name: ModelParameter(string_value=value) for name, value in self.parameters.items()}
        parameters = {**config.parameters, **added}
        return dataclasses.replace(config, platform=platform, parameters=parameters, **self.changes)


def propose(
    config: ModelConfig,
    measured: Sequence[Latency],
    instances: Sequence[Throughput],
    contest: ContestVerdict | None = None,
    precision: Advice | None = None,
) -> Proposal:
    """Derive settings from latencies by batch size and rates by number of instances.

    With a ``contest``, both were measured with its winner; with ``precision``, with that parameter.
    """
    advice: list[Advice] = []
    changes: dict[str, Any] = {
        "max_batch_size": config.max_batch_size,
        "dynamic_batching": config.dynamic_batching,
    }
    if contest is not None:
        changes["backend"] = contest.winner.backend
        advice.append(Advice("backend", f'"{contest.winner.backend}"', contest.reason))
    if precision is not None:
        advice.append(precision)
    if config.max_batch_size > 0 and len(measured) > 1:
        changes |= _batches(config, measured, advice)
    if len(instances) > 1:
        changes |= _instances(instances, advice)
    return Proposal(tuple(advice), changes, {} if precision is None else {precision.setting: precision.value})


def _batches(config: ModelConfig, measured: Sequence[Latency], advice: list[Advice]) -> dict[str, Any]:
    alone = measured[0]
    best = max(measured, key=lambda each: each.per_second)
    enough = next(each for each in measured if each.per_second >= _NEARLY_BEST * best.per_second)
    if best.per_second < _GAIN * alone.per_second:
        figures = f"{_rate(best)} at best with {best.batch}, {_rate(alone)} with 1"
        advice.append(Advice("dynamic_batching", "", f"batching gains nothing: {figures}"))
        return {"dynamic_batching": None}
    gain = f"{_rate(enough)} in {enough.ms:.1f} ms; 1 reaches {_rate(alone)} in {alone.ms:.1f} ms"
    more = f", {best.batch} {_rate(best)} in {best.ms:.1f} ms" if best is not enough else ""
    advice.append(Advice("max_batch_size", str(enough.batch), gain + more))
    reason = "requests that arrive while the model is busy form the next batch; no delay is needed"
    advice.append(Advice("dynamic_batching", "{ }", reason))
    favourites = tuple(_favourites([each for each in measured if each.batch <= enough.batch]))
    if favourites:
        reason = "these sizes are at least 25 % faster than their neighbours"
        advice.append(Advice("preferred_batch_size", f"[ {', '.join(map(str, favourites))} ]", reason))
    else:
        advice.append(Advice("preferred_batch_size", "", "no size is much faster than its neighbours"))
    known = config.dynamic_batching or ModelDynamicBatching()
    batching = dataclasses.replace(known, preferred_batch_size=favourites)
    return {"max_batch_size": enough.batch, "dynamic_batching": batching}


def _favourites(measured: Sequence[Latency]) -> list[int]:
    """Return the sizes that are much faster than both the next smaller and the next larger one."""
    return [
        each.batch
        for before, each, after in zip(measured, measured[1:], measured[2:], strict=False)
        if each.per_second > _STANDS_OUT * max(before.per_second, after.per_second)
    ]


def _instances(measured: Sequence[Throughput], advice: list[Advice]) -> dict[str, Any]:
    one = measured[0]
    best = max(measured, key=lambda each: each.per_second)
    figures = ", ".join(map(str, measured))
    if best.per_second < _INSTANCES_GAIN * one.per_second or not best.is_above(one):
        advice.append(Advice("instance_group", "", f"more instances gain little: {figures}"))
        return {}
    enough = next(each for each in measured if each.per_second >= _NEARLY_BEST * best.per_second)
    advice.append(Advice("instance_group", f"[ {{ count: {enough.instances} }} ]", figures))
    return {"instance_group": (ModelInstanceGroup(count=enough.instances),)}


def _rate(measured: Latency) -> str:
    return f"{measured.per_second:,.0f}/s"
