"""What does not fit between an ensemble and its models: where it stands, and what to do."""

from __future__ import annotations

import pytest

from nerite.config.mistake import Mistake, show_path
from nerite.config.model_config import ModelConfig
from nerite.config.text import parse_text
from nerite.config.validate_ensemble import check_wiring

STEP = 'model_name: "m" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }'
MODEL = """name: "m" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }"""


def read(text: str) -> ModelConfig:
    parsed = parse_text(text, "config.pbtxt")
    assert not parsed.mistakes
    return parsed.config


def ensemble(step: str = STEP, *, dims: str = "2", out: str = "FP32", batch: int = 8, more: str = "") -> ModelConfig:
    return read(
        f"""name: "e" platform: "ensemble" max_batch_size: {batch} {more}
        input {{ name: "IN" data_type: TYPE_FP32 dims: [ {dims} ] }}
        output {{ name: "OUT" data_type: TYPE_{out} dims: [ 2 ] }}
        ensemble_scheduling {{ step {{ {step} }} }}"""
    )


def found(config: ModelConfig, *models: str) -> list[Mistake]:
    return list(check_wiring(config, [read(model) for model in models or (MODEL,)]))


def test_what_fits() -> None:
    assert found(ensemble()) == []
    assert found(ensemble(dims="-1")) == []


def test_a_model_without_a_batch_dimension_may_have_it_in_its_dims() -> None:
    flat = MODEL.replace("max_batch_size: 8", "").replace("[ 2 ]", "[ -1, 2 ]").replace("[ -1 ]", "[ -1, 2 ]")
    assert found(ensemble(batch=1), flat) == []


@pytest.mark.parametrize(
    ("config", "model", "path", "message", "remedy"),
    [
        (
            ensemble(out="INT8"),
            MODEL,
            "output_map.OUT",
            "inconsistent data type: TYPE_INT8",
            "Give it one data_type in",
        ),
        (
            ensemble(dims="3"),
            MODEL,
            "input_map.IN",
            "inconsistent shape: [-1,3]",
            "Give it the same dims in 'e' and 'm'",
        ),
        (
            ensemble(STEP.replace('key: "IN"', 'key: "INN"')),
            MODEL,
            "input_map.INN",
            "non-existing input INN",
            "Did you",
        ),
        (ensemble(STEP.replace('key: "OUT"', 'key: "Y"')), MODEL, "output_map.Y", "non-existing output Y", "There are"),
        (ensemble(batch=9), MODEL, "max_batch_size", "allows maximum batch size 9", "Write max_batch_size: 8 here"),
    ],
)
def test_what_does_not(config: ModelConfig, model: str, path: str, message: str, remedy: str) -> None:
    mistake = found(config, model)[0]
    assert show_path(mistake.path).endswith(path)
    assert message in mistake.message
    assert mistake.remedy.startswith(remedy)


def test_an_input_that_is_not_mapped() -> None:
    more = MODEL + ' input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }'
    (mistake,) = found(ensemble(), more)
    assert mistake.message == "in ensemble e, input X in model m is not mapped to any ensemble tensors"
    assert found(ensemble(), more.replace("dims: [ 2 ] }", "dims: [ 2 ] optional: true }")) == []


def test_tensors_of_a_stream_meet_others() -> None:
    stream = MODEL + " model_transaction_policy { decoupled: true }"
    both = MODEL + ' input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }'
    taking = STEP.replace('value: "OUT"', 'value: "many"')
    mixing = STEP.replace('value: "IN"', 'value: "many"') + ' input_map { key: "X" value: "IN" }'
    config = ensemble(f"{taking} }} step {{ {mixing}")
    (mistake,) = found(config, stream, both)
    assert mistake.message == (
        "in ensemble e, step of model 'e' receives inputs originated from different decoupled models"
    )
    assert show_path(mistake.path) == "ensemble_scheduling.step[1]"
    assert "step 2 (model 'm')" in mistake.remedy
    assert found(config, MODEL, both) == []


def test_a_cache_before_a_stream() -> None:
    (mistake,) = found(
        ensemble(more="response_cache { enable: true }"), MODEL + " model_transaction_policy { decoupled: true }"
    )
    assert mistake.message.startswith("Response Cache does not currently support model e with 'decoupled'")
