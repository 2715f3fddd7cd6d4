"""What two versions answered to one request, compared."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from nerite.core import tensor as dtypes
from nerite.core.errors import Internal
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec, from_array
from nerite.judge.answers import (
    ELEMENTS,
    Agreement,
    Answer,
    AnswerComparison,
    NumericDifference,
    compare_answers,
    compare_texts,
    comparison_json,
    shared_prefix,
)


def answer(*parts: dict[str, Any], error: str = "") -> Answer:
    """An answer of these responses, each of which has arrays by name."""
    responses = []
    for part in parts:
        tensors = [from_array(name, np.asarray(values)) for name, values in part.items()]
        header = ResponseHeader("m", "1", [spec for spec, _ in tensors])
        responses.append(InferenceResponse(header, [data for _, data in tensors]))
    return Answer(responses, Internal(error) if error else None)


def compared(ours: Any, theirs: Any, **settings: Any) -> AnswerComparison:
    def made(values: Any) -> Answer:
        return answer({"OUT": np.asarray(values, None if isinstance(values, np.ndarray) else np.float32)})

    return compare_answers(made(ours), made(theirs), **{"tolerance": 1e-3, **settings})


def numbers(found: AnswerComparison) -> NumericDifference:
    (output,) = found.outputs
    assert output.numbers is not None
    return output.numbers


def test_equal_answers() -> None:
    found = compared([[1, math.nan, math.inf]], [[1, math.nan, math.inf]])
    assert found.agreement is Agreement.EQUAL
    assert numbers(found) == (3, 0, 0.0, 0.0, 0, 0)


def test_numbers_within_the_tolerance_are_close() -> None:
    found = compared([[3, 4]], [[3, 4.005]], tolerance=0.002)
    assert found.agreement is Agreement.CLOSE
    assert numbers(found)[:2] == (2, 1)
    assert numbers(found).largest == pytest.approx(0.005, rel=1e-3)
    assert numbers(found).relative == found.relative == pytest.approx(0.001, rel=1e-3)
    assert compared([[3, 4]], [[3, 4.005]], tolerance=0.0005).agreement is Agreement.DIFFERENT


@pytest.mark.parametrize("theirs", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_infinitely_far(theirs: float) -> None:
    found = compared([[1, 2]], [[1, theirs]])
    assert (found.agreement, found.relative) == (Agreement.DIFFERENT, math.inf)
    json.dumps(comparison_json(found), allow_nan=False)


def test_distance_from_zeros_is_infinite() -> None:
    assert compared([0.0, 0.0], [0.0, 0.1]).relative == math.inf


@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.uint64, np.float16, np.float64])
def test_types(kind: Any) -> None:
    ours, theirs = np.array([[0, 1]], kind), np.array([[1, 1]], kind)
    assert compared(ours, ours).agreement is Agreement.EQUAL
    assert numbers(compared(ours, theirs))[:3] == (2, 1, 1.0)


def test_large_integers_that_differ_are_not_equal() -> None:
    found = compared(np.array([2**63], np.uint64), np.array([2**63 + 1], np.uint64))
    assert found.agreement is Agreement.CLOSE


def test_bf16_is_compared_as_numbers() -> None:
    def made(value: int) -> Answer:
        spec = TensorSpec("OUT", dtypes.BF16, (1,))
        return Answer([InferenceResponse(ResponseHeader("m", "1", [spec]), [value.to_bytes(2, "little")])])

    assert numbers(compare_answers(made(0x3F80), made(0x4000), tolerance=0.1))[:3] == (1, 1, 1.0)


def test_labels_of_probabilities() -> None:
    found = compared([[0.6, 0.4], [0.2, 0.8]], [[0.4, 0.6], [0.1, 0.9]], tolerance=10)
    assert (found.labels, found.agreement) == ((2, 1), Agreement.DIFFERENT)


def test_what_has_no_labels() -> None:
    """Embeddings have a largest element, too; and one number has no label."""
    assert compared([[3.0, 4.0]], [[4.0, 3.0]]).labels == (0, 0)
    assert compared([[1.0]], [[1.0]]).labels == (0, 0)


def test_a_label_file_makes_labels() -> None:
    assert compared([[3.0, 4.0]], [[4.0, 3.0]], labelled={"OUT"}).labels == (1, 0)


def test_the_name_makes_labels() -> None:
    ours, theirs = answer({"logits": np.array([[3.0, 4.0]])}), answer({"logits": np.array([[3.0, 5.0]])})
    assert compare_answers(ours, theirs, tolerance=1).labels == (1, 1)


def test_large_outputs_are_sampled_by_whole_rows() -> None:
    rows = np.zeros((1000, 100), np.float32)
    rows[:, 0] = 1
    found = numbers(compared(rows, rows + np.float32(0.5)))
    assert found.compared == ELEMENTS // 100 * 100 == found.differing
    assert found.largest == 0.5


def test_rows_that_are_too_large_are_sampled() -> None:
    found = compared(np.zeros((2, 3 * ELEMENTS), np.int8), np.ones((2, 3 * ELEMENTS), np.int8))
    assert numbers(found) == (ELEMENTS, ELEMENTS, 1.0, math.inf, 0, 0)


def test_the_end_of_a_large_output_is_looked_at() -> None:
    ours = np.zeros((1000, 100), np.float32)
    theirs = ours.copy()
    theirs[-1] = 1
    assert compared(ours, theirs).agreement is Agreement.DIFFERENT


@pytest.mark.parametrize(
    ("theirs", "mismatch"),
    [
        ({"OUT": np.zeros((2, 1), np.float32)}, "[1, 2] and [2, 1]"),
        ({"OUT": np.zeros((1, 2), np.float64)}, "FP32 and FP64"),
        ({}, "the shadow does not have it"),
    ],
)
def test_what_cannot_be_compared(theirs: dict[str, Any], mismatch: str) -> None:
    found = compare_answers(answer({"OUT": np.zeros((1, 2), np.float32)}), answer(theirs), tolerance=1)
    assert (found.agreement, found.outputs[0].mismatch) == (Agreement.DIFFERENT, mismatch)


def test_an_output_that_only_the_shadow_has() -> None:
    found = compare_answers(answer({}), answer({"MORE": np.zeros(1)}), tolerance=1)
    assert [(each.name, each.mismatch) for each in found.outputs] == [("MORE", "only the shadow has it")]


def test_empty_outputs() -> None:
    assert compared(np.zeros((0, 3)), np.zeros((0, 3))).agreement is Agreement.EQUAL


@pytest.mark.parametrize(
    ("ours", "theirs", "agreement"),
    [
        ("", "broken", Agreement.SHADOW_FAILED),
        ("broken", "", Agreement.ROUTE_FAILED),
        ("broken", "other", Agreement.BOTH_FAILED),
    ],
)
def test_failures(ours: str, theirs: str, agreement: Agreement) -> None:
    found = compare_answers(answer({"OUT": [1.0]}, error=ours), answer({"OUT": [1.0]}, error=theirs), tolerance=1)
    assert found.agreement is agreement


def said(*parts: str, finish: str = "stop") -> Answer:
    reasons = ["None"] * (len(parts) - 1) + [finish]
    return answer(
        *(
            {
                "text_output": np.array([part.encode()], object),
                "finish_reason": np.array([reason.encode()], object),
                "num_output_tokens": [1],
            }
            for part, reason in zip(parts, reasons, strict=True)
        )
    )


def test_streams_of_text_that_were_cut_differently_are_equal() -> None:
    found = compare_answers(said("to be ", "or not"), said("to ", "be or ", "not"), tolerance=0)
    assert (found.agreement, found.finish, found.responses) == (Agreement.EQUAL, ("stop", "stop"), (2, 3))


def test_texts_differ() -> None:
    found = compare_answers(said("to be ", "or not"), said("to be ", "sure", finish="length"), tolerance=1)
    (text,) = found.texts
    assert (text.shared, text.length, text.shadow_length, text.differing) == (6, 12, 10, 1)
    assert text.ratio == 0.5
    assert (found.agreement, found.finish) == (Agreement.DIFFERENT, ("stop", "length"))


def test_a_finish_reason_alone_makes_a_difference() -> None:
    assert compare_answers(said("a"), said("a", finish="length"), tolerance=1).agreement is Agreement.DIFFERENT


def test_streams_of_numbers_of_other_lengths_differ() -> None:
    part = {"OUT": np.ones(1)}
    assert compare_answers(answer(part, part), answer(part), tolerance=1).agreement is Agreement.DIFFERENT
    assert compare_answers(answer(part, part), answer(part, part), tolerance=1).agreement is Agreement.EQUAL


def test_more_texts_than_the_other() -> None:
    assert compare_texts([b"a", b""], [b"a"]).differing == 1


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [("", "", 0), ("abc", "abc", 3), ("abc", "abd", 2), ("x", "abc", 0), ("a" * 9999 + "b", "a" * 9999 + "c", 9999)],
)
def test_shared_prefix(first: str, second: str, length: int) -> None:
    assert shared_prefix(first, second) == shared_prefix(second, first) == length


def test_a_document_has_nothing_of_the_texts() -> None:
    document = comparison_json(compare_answers(said("secret"), said("other"), tolerance=1))
    assert "secret" not in json.dumps(document)
    assert document["finish_reason"] == ("stop", "stop")
