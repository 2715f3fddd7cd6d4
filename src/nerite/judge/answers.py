"""Compares what two versions answered to one request: numbers by distance, scores by label, text by shared prefix.

The time of a comparison is bounded: of large outputs whole rows are sampled, evenly spaced. Pure.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, Buffer, TensorSpec

ELEMENTS: Final = 16_384
"""Maximum number of elements of all outputs that one comparison looks at."""
TEXT_BYTES: Final = 1 << 18
"""Maximum number of bytes of one output of strings that a comparison looks at."""
_STRINGS: Final = 1024
"""Maximum number of strings of an output that are compared one by one."""
_RESPONSES: Final = 64
"""Maximum number of responses of a stream whose numbers are compared."""
_FINISH_REASON: Final = "finish_reason"
"""Output of text models that says why the text ended."""
_REASON_BYTES: Final = 1024
_NO_REASON: Final = b"None"
_LENGTH: Final = 4
"""Bytes in front of each string of a BYTES tensor: its length."""
_SCORES: Final = ("logit", "score", "prob", "class")
"""Parts of the names of outputs whose largest element is a label."""
_SUM: Final = 0.01
"""Deviation from 1 of the sum of probabilities."""


class Agreement(enum.StrEnum):
    """Result of a comparison."""

    EQUAL = "equal"
    """All that was compared is equal, bit by bit."""
    CLOSE = "close"
    """Numbers differ within the tolerance, and labels and texts agree."""
    DIFFERENT = "different"
    SHADOW_FAILED = "shadow_failed"
    """Only the shadow failed."""
    ROUTE_FAILED = "route_failed"
    """Only the caller's request failed."""
    BOTH_FAILED = "both_failed"


class NumericDifference(NamedTuple):
    """How far the numbers of an output are apart."""

    compared: int
    """Number of elements; fewer than the output has if it is large."""
    differing: int
    """Those that are not equal. NaN equals NaN."""
    largest: float
    """Maximum of the absolute differences; infinite if only one of two numbers is finite."""
    relative: float
    """Root mean square of the differences, relative to that of the caller's answer."""
    rows: int = 0
    """Rows whose labels were compared; 0 for outputs that are no scores."""
    agreeing: int = 0
    """Those with the same label, which is the position of the largest element."""


class TextDifference(NamedTuple):
    """How two texts differ. Lengths are in characters."""

    shared: int
    """Length of the common beginning."""
    length: int
    """Of the caller's answer."""
    shadow_length: int
    compared: int = 1
    """Number of strings."""
    differing: int = 0
    """Those that are not equal."""

    @property
    def ratio(self) -> float:
        """The shared part of the longer text."""
        return self.shared / longest if (longest := max(self.length, self.shadow_length)) else 1.0


class OutputDifference(NamedTuple):
    """Comparison of one output."""

    name: str
    mismatch: str = ""
    """Why the values cannot be compared: another type or shape, or only one of the answers has the output."""
    numbers: NumericDifference | None = None
    text: TextDifference | None = None


@dataclass
class Answer:
    """What a request was answered with."""

    responses: list[InferenceResponse] = field(default_factory=list)
    error: NeriteError | None = None
    latency_us: float = 0.0

    @property
    def size(self) -> int:
        """Number of bytes of the outputs."""
        return sum(len(data) for response in self.responses for data in response.data)


@dataclass
class AnswerComparison:
    """The answer of a shadow beside that of the caller's request."""

    agreement: Agreement
    outputs: Sequence[OutputDifference] = ()
    finish: tuple[str, str] = ("", "")
    """Why the text of each of them ended, where the answers say so."""
    responses: tuple[int, int] = (0, 0)

    @property
    def relative(self) -> float | None:
        """The largest relative distance of an output; None if no numbers were compared."""
        return max((each.numbers.relative for each in self.outputs if each.numbers is not None), default=None)

    @property
    def labels(self) -> tuple[int, int]:
        """Rows whose labels were compared, and those with the same label."""
        numbers = [each.numbers for each in self.outputs if each.numbers is not None]
        return sum(each.rows for each in numbers), sum(each.agreeing for each in numbers)

    @property
    def texts(self) -> Sequence[TextDifference]:
        """The outputs of strings."""
        return [each.text for each in self.outputs if each.text is not None]


def compare_answers(
    answer: Answer, shadow: Answer, *, tolerance: float, labelled: Collection[str] = (), elements: int = ELEMENTS
) -> AnswerComparison:
    """Compare two answers. ``labelled`` has the names of outputs with a label file; their maximum is a label.

    ``tolerance`` is the relative distance up to which numbers are close.
    """
    counts = (len(answer.responses), len(shadow.responses))
    if answer.error is not None or shadow.error is not None:
        if answer.error is not None and shadow.error is not None:
            return AnswerComparison(Agreement.BOTH_FAILED, responses=counts)
        failed = Agreement.ROUTE_FAILED if answer.error is not None else Agreement.SHADOW_FAILED
        return AnswerComparison(failed, responses=counts)
    ours, theirs = _by_name(answer), _by_name(shadow)
    finish = (_finish_reason(ours), _finish_reason(theirs))
    names = [name for name in dict.fromkeys((*ours, *theirs)) if name != _FINISH_REASON]
    share = max(elements // max(len(names), 1), 1)
    outputs = [
        found
        for name in names
        if (found := _output(name, ours.get(name, ()), theirs.get(name, ()), name in labelled, share)) is not None
    ]
    streams_text = any(each.text is not None for each in outputs)
    equal = finish[0] == finish[1] and (streams_text or counts[0] == counts[1])
    close = equal
    for each in outputs:
        equal = equal and _is_equal(each)
        close = close and _is_close(each, tolerance)
    agreement = Agreement.EQUAL if equal else Agreement.CLOSE if close else Agreement.DIFFERENT
    return AnswerComparison(agreement, outputs, finish, counts)


_Values = list[tuple[TensorSpec, Buffer]]


def _by_name(answer: Answer) -> Mapping[str, _Values]:
    """Return the tensors of an answer by output, in the order in which they came."""
    found: dict[str, _Values] = {}
    for response in answer.responses:
        if response.header is not None:
            for spec, data in zip(response.header.outputs, response.buffers, strict=True):
                found.setdefault(spec.name, []).append((spec, data))
    return found


def _finish_reason(outputs: Mapping[str, _Values]) -> str:
    """Return the last reason that is given; empty if there is none."""
    for spec, data in reversed(outputs.get(_FINISH_REASON, ())):
        if spec.datatype is dtypes.BYTES:
            reasons = [each for each in first_strings(data, spec.elements, _REASON_BYTES) if each != _NO_REASON]
            if reasons:
                return b",".join(reasons).decode(errors="replace")
    return ""


def _is_equal(output: OutputDifference) -> bool:
    numbers, text = output.numbers, output.text
    return not (output.mismatch or (numbers is not None and numbers.differing) or (text is not None and text.differing))


def _is_close(output: OutputDifference, tolerance: float) -> bool:
    numbers, text = output.numbers, output.text
    if output.mismatch or (text is not None and text.differing):
        return False
    return numbers is None or (numbers.relative <= tolerance and numbers.agreeing == numbers.rows)


def _output(
    name: str, ours: Sequence[tuple[TensorSpec, Buffer]], theirs: Sequence[tuple[TensorSpec, Buffer]],
    labelled: bool, elements: int,
) -> OutputDifference | None:  # fmt: skip
    """Compare an output; None if there is nothing to compare: numbers of streams whose parts were cut differently."""
    if not ours or not theirs:
        return OutputDifference(name, "only the shadow has it" if not ours else "the shadow does not have it")
    first, other = ours[0][0], theirs[0][0]
    if first.datatype is not other.datatype:
        return OutputDifference(name, f"{first.datatype.name} and {other.datatype.name}")
    if first.datatype is dtypes.BYTES:
        return OutputDifference(name, text=compare_texts(_strings(ours), _strings(theirs)))
    if len(ours) != len(theirs):
        return None
    found: NumericDifference | None = None
    pairs = list(zip(ours, theirs, strict=True))[:_RESPONSES]
    for (spec, data), (shadow_spec, shadow_data) in pairs:
        if spec.shape != shadow_spec.shape:
            return OutputDifference(name, f"{[*spec.shape]} and {[*shadow_spec.shape]}")
        each = compare_numbers(spec, data, shadow_data, labelled=labelled, elements=max(elements // len(pairs), 1))
        found = each if found is None else _merged(found, each)
    return OutputDifference(name, numbers=found)


def _strings(values: Sequence[tuple[TensorSpec, Buffer]]) -> list[bytes]:
    """Return the strings of an output, those of the parts of a stream joined."""
    parts: list[list[bytes]] = []
    left = TEXT_BYTES
    for spec, data in values:
        if left <= 0:
            break
        for index, text in enumerate(first_strings(data, min(spec.elements, _STRINGS), left)):
            if index == len(parts):
                parts.append([])
            parts[index].append(text)
        left -= len(data)
    return [b"".join(each) for each in parts]


def first_strings(data: Buffer, count: int, size: int) -> list[bytes]:
    """Return the first ``count`` elements of a BYTES tensor that are in its first ``size`` bytes."""
    raw = bytes(memoryview(data)[:size])
    found: list[bytes] = []
    at = 0
    while len(found) < count and at + _LENGTH <= len(raw):
        begin = at + _LENGTH
        at = begin + int.from_bytes(raw[at:begin], "little")
        found.append(raw[begin:at])
    return found


def compare_texts(ours: Sequence[bytes], theirs: Sequence[bytes]) -> TextDifference:
    """Compare texts; those that only one of both has differ from their beginning."""
    shared = length = shadow_length = differing = 0
    count = max(len(ours), len(theirs))
    for index in range(count):
        first = ours[index] if index < len(ours) else b""
        second = theirs[index] if index < len(theirs) else b""
        if first == second and index < min(len(ours), len(theirs)):
            size = len(first.decode(errors="replace"))
            shared, length, shadow_length = shared + size, length + size, shadow_length + size
            continue
        differing += 1
        text, shadow_text = first.decode(errors="replace"), second.decode(errors="replace")
        shared += shared_prefix(text, shadow_text)
        length += len(text)
        shadow_length += len(shadow_text)
    return TextDifference(shared, length, shadow_length, count, differing)


def shared_prefix(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # texts of megabytes: bisect, because comparing slices is fast
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def compare_numbers(
    spec: TensorSpec, ours: Buffer, theirs: Buffer, *, labelled: bool = False, elements: int = ELEMENTS
) -> NumericDifference:
    """Compare two tensors of one type and shape; of large ones, at most ``elements`` elements."""
    first, rows_whole = _sampled(spec, ours, elements)
    second, _ = _sampled(spec, theirs, elements)
    if not first.size:
        return NumericDifference(0, 0, 0.0, 0.0)
    same = first == second
    first, second = _as_float(spec, first), _as_float(spec, second)
    if spec.datatype in (dtypes.FP16, dtypes.FP32, dtypes.FP64, dtypes.BF16):
        same = (first == second) | (np.isnan(first) & np.isnan(second))
    differing = int(first.size - np.count_nonzero(same))
    largest = relative = 0.0
    if differing:
        with np.errstate(all="ignore"):
            distance = np.where(same, 0.0, np.abs(first - second))
            distance[~np.isfinite(distance)] = math.inf
            largest = float(distance.max())
            size = math.sqrt(float(np.mean(np.square(np.where(np.isfinite(first), first, 0.0)))))
            apart = math.sqrt(float(np.mean(np.square(distance))))
        relative = apart / size if size else math.inf
    rows = agreeing = 0
    if rows_whole and _scores(spec, first, second, labelled=labelled):
        rows = len(first)
        agreeing = int(np.count_nonzero(first.argmax(axis=1) == second.argmax(axis=1)))
    return NumericDifference(int(first.size), differing, largest, relative, rows, agreeing)


def _sampled(spec: TensorSpec, data: Buffer, most: int) -> tuple[Array, bool]:
    """Return rows of a tensor with at most ``most`` elements, and whether they are whole."""
    columns = spec.shape[-1] if len(spec.shape) > 1 else spec.elements
    values = np.ndarray((spec.elements // columns if columns else 0, columns), spec.datatype.numpy, data)
    if values.size <= most:
        return values, True
    if columns <= most:
        return values[np.linspace(0, len(values) - 1, most // columns).astype(int)], True
    return values[:1, :: -(-columns // most)], False


def _as_float(spec: TensorSpec, values: Array) -> Array:
    if spec.datatype is dtypes.BF16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def _scores(spec: TensorSpec, first: Array, second: Array, *, labelled: bool) -> bool:
    """Return whether the largest element of each row is a label."""
    if len(spec.shape) > 2 or first.shape[1] < 2:
        return False
    if labelled:
        return True
    if spec.datatype not in (dtypes.FP16, dtypes.FP32, dtypes.FP64, dtypes.BF16):
        return False
    name = spec.name.lower()
    return any(part in name for part in _SCORES) or (_probabilities(first) and _probabilities(second))


def _probabilities(rows: Array) -> bool:
    with np.errstate(all="ignore"):
        return bool((rows >= 0).all() and (np.abs(rows.sum(axis=1) - 1) <= _SUM).all())


def _merged(first: NumericDifference, second: NumericDifference) -> NumericDifference:
    """Return the difference of two parts of a stream; their relative distances are weighted by elements."""
    compared = first.compared + second.compared
    squares = first.relative**2 * first.compared + second.relative**2 * second.compared
    return NumericDifference(
        compared,
        first.differing + second.differing,
        max(first.largest, second.largest),
        math.sqrt(squares / compared) if compared else 0.0,
        first.rows + second.rows,
        first.agreeing + second.agreeing,
    )


def comparison_json(comparison: AnswerComparison) -> dict[str, Any]:
    """Return a comparison as JSON, without anything of the answers but numbers and names of outputs."""
    outputs: list[dict[str, Any]] = []
    for each in comparison.outputs:
        entry: dict[str, Any] = {"name": each.name}
        if each.mismatch:
            entry["mismatch"] = each.mismatch
        if each.numbers is not None:
            entry |= {name: _finite(value) for name, value in each.numbers._asdict().items()}
        if each.text is not None:
            entry |= each.text._asdict()
        outputs.append(entry)
    document: dict[str, Any] = {"agreement": str(comparison.agreement), "outputs": outputs}
    if any(comparison.finish):
        document["finish_reason"] = comparison.finish
    if max(comparison.responses) > 1:
        document["responses"] = comparison.responses
    return document


def _finite(value: float) -> float | str:
    """Return a number as JSON knows it."""
    return value if math.isfinite(value) else str(value)
