"""Which backend is proposed, where several have the file."""

from __future__ import annotations

import numpy as np
import pytest

from nerite.config.defaults import others_with_the_file
from nerite.config.model_config import ModelConfig
from nerite.core.tensor import Array
from nerite.tools.add.proposal import Contestant, Latency, contest_verdict, largest_difference, propose

ANSWER = {"y": np.array([[1.0, -2.0]], np.float32)}


def contestant(backend: str, alone: float, eight: float, answers: dict[str, Array] = ANSWER) -> Contestant:
    """One that takes so many milliseconds for one, and for eight."""
    return Contestant(backend, [Latency(1, alone, alone), Latency(8, eight, eight)], answers)


OWN = contestant("onnxruntime", 10, 40)


def test_the_faster_one_wins_and_the_settings_are_its_own() -> None:
    found = contest_verdict(OWN, [contestant("slow", 20, 80), contestant("openvino", 5, 10)])
    assert found.winner.backend == "openvino"
    assert found.reason == (
        "openvino reaches 800/s, and 5.00 ms for one request; onnxruntime reaches 200/s, and 10.00 ms for one request; "
        "outputs differ by 0 of the largest value"
    )
    config = ModelConfig(backend="onnxruntime", platform="onnxruntime_onnx", max_batch_size=8)
    proposal = propose(config, found.winner.latencies, [], found)
    assert [(each.setting, each.value) for each in proposal.advice][:2] == [
        ("backend", '"openvino"'), ("max_batch_size", "8")
    ]  # fmt: skip
    applied = proposal.applied(config)
    assert (applied.backend, applied.platform) == ("openvino", "")


@pytest.mark.parametrize(
    "other",
    [
        contestant("openvino", 9, 37),
        contestant("openvino", 12, 10),
        contestant("openvino", 1, 1, {"y": np.array([[1.0, -2.1]], np.float32)}),
    ],
    ids=["little is gained", "a single one waits longer", "it answers something else"],
)
def test_the_own_one_stays(other: Contestant) -> None:
    found = contest_verdict(OWN, [other])
    assert found.winner is OWN
    config = ModelConfig(backend="onnxruntime", platform="onnxruntime_onnx")
    assert propose(config, OWN.latencies, [], found).applied(config).platform == "onnxruntime_onnx"


def test_a_gain_in_batches_may_cost_a_single_one_a_tenth() -> None:
    assert contest_verdict(OWN, [contestant("openvino", 11, 20)]).winner.backend == "openvino"


@pytest.mark.parametrize(
    ("some", "other", "apart"),
    [
        ([1.0, -2.0], [1.0, -2.0], 0.0),
        ([1.0, -2.0], [1.0, -1.9], 0.05),
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([1.0, np.inf], [1.0, 2.0], 1.0),
        ([0.0, 0.0], [0.0, 0.5], 0.5),
        ([1.0], [1.0, 2.0], 1.0),
        ([b"a"], [b"a"], 0.0),
        ([b"a"], [b"b"], 1.0),
    ],
)
def test_how_far_answers_are_apart(some: list[object], other: list[object], apart: float) -> None:
    assert largest_difference({"y": np.array(some)}, {"y": np.array(other)}) == pytest.approx(apart)


def test_answers_of_other_names() -> None:
    assert largest_difference(ANSWER, {"z": ANSWER["y"]}) == 1.0


def test_who_has_the_same_file() -> None:
    onnx = ModelConfig(backend="onnxruntime", default_model_filename="model.onnx")
    assert others_with_the_file(onnx) == ["openvino"]
    assert others_with_the_file(ModelConfig(backend="openvino", default_model_filename="model.xml")) == []
    assert others_with_the_file(ModelConfig(backend="python", default_model_filename="net.onnx")) == []
