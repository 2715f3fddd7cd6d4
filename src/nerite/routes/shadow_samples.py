"""File of comparisons with a shadow: bounded JSON lines, without what is private unless that is asked for."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from nerite.core import tensor as dtypes
from nerite.core.failures import system_error
from nerite.core.tensor import Buffer, TensorSpec, to_array
from nerite.judge.answers import Answer, AnswerComparison, comparison_json, first_strings
from nerite.observability.log import log

MAX_BYTES: Final = 16 << 20
"""Size at which the file is renamed to one with ``.1`` behind its name, which replaces an older one."""
_MAX_WAITING: Final = 1000
"""Maximum number of samples that wait until they are written; others are left out."""
_VALUES: Final = 64
"""Maximum number of elements of a tensor in a sample."""
_TEXT: Final = 4096
"""Maximum number of bytes of a string in a sample."""


class ShadowSamples:
    """Appends samples to a file, on a thread. For the loop's thread only."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.left_out = 0
        """Samples that were not written because too many waited, or because the file could not be written."""
        self._max_bytes = max_bytes
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._thread = ThreadPoolExecutor(1, "shadow_samples")
        self._writing = False

    def add(self, sample: Mapping[str, Any]) -> None:
        """Have a sample written."""
        if len(self._waiting) >= _MAX_WAITING:
            self.left_out += 1
            return
        self._waiting.append(sample)
        if not self._writing:
            self._writing = True
            with contextlib.suppress(RuntimeError):  # it is closed
                self._thread.submit(self._write)

    def close(self) -> None:
        """Take no more samples. Those that wait are still written."""
        self._thread.shutdown(wait=False)

    def _write(self) -> None:
        """Write all samples that wait. Runs on the thread."""
        self._writing = False  # before the first is taken: what is added from now on is written by the next call
        lines: list[bytes] = []
        try:
            while self._waiting:
                lines.append(orjson.dumps(self._waiting.popleft()) + b"\n")
            while lines:
                lines = self._append(lines)
        except (OSError, TypeError) as error:
            self.left_out += max(len(lines), 1)
            reason = system_error(error, self.path) if isinstance(error, OSError) else str(error)
            log.warning(f"samples of a shadow are not written: {reason}")

    def _append(self, lines: Sequence[bytes]) -> list[bytes]:
        """Append as many lines as fit; return the others, after the file was renamed."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self.path, flags, 0o600), "ab") as file:
            left = self._max_bytes - os.fstat(file.fileno()).st_size
            fitting = 0
            for line in lines:
                if left < len(line) and left < self._max_bytes:
                    break
                file.write(line)
                left -= len(line)
                fitting += 1
        if fitting < len(lines):
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        return list(lines[fitting:])


def sample_of(
    route: str,
    arm: str,
    shadow_arm: str,
    answer: Answer,
    shadow: Answer,
    comparison: AnswerComparison,
    inputs: tuple[Sequence[TensorSpec], Sequence[Buffer]] | None,
) -> dict[str, Any]:
    """Return a sample as JSON. With ``inputs`` it has the contents of the request, the answers and errors, too."""
    sample: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "route": route,
        "arm": arm,
        "shadow": shadow_arm,
        **comparison_json(comparison),
        "latency_us": round(answer.latency_us),
        "shadow_latency_us": round(shadow.latency_us),
    }
    for name, each in (("error", answer.error), ("shadow_error", shadow.error)):
        if each is not None:
            sample[name] = each.code if inputs is None else f"{each.code}: {each.message[:_TEXT]}"
    if inputs is not None:
        sample["inputs"] = _contents(*inputs)
        for name, each_answer in (("answer", answer), ("shadow_answer", shadow)):
            sample[name] = [
                _contents(response.header.outputs, response.buffers)
                for response in each_answer.responses[:_VALUES]
                if response.header is not None
            ]
    return sample


def _contents(specs: Sequence[TensorSpec], data: Sequence[Buffer]) -> dict[str, Any]:
    """Return the beginning of each tensor."""
    return {spec.name: _beginning(spec, each) for spec, each in zip(specs, data, strict=True)}


def _beginning(spec: TensorSpec, data: Buffer) -> list[Any]:
    if spec.datatype is dtypes.BYTES:
        texts = first_strings(data, min(spec.elements, _VALUES), _VALUES * _TEXT)
        return [text[:_TEXT].decode(errors="replace") for text in texts]
    count = min(spec.elements, _VALUES)
    values = to_array(TensorSpec(spec.name, spec.datatype, (count,)), memoryview(data)[: count * spec.datatype.size])
    return [value if value == value and abs(value) != float("inf") else str(value) for value in values.tolist()]
