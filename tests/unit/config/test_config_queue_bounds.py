from __future__ import annotations

import pytest

from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelParameter, ModelQueuePolicy
from nerite.config.model_parameters import bounds_of, check_queue_bounds
from nerite.config.options import QueueOptions

FLAGS = QueueOptions(7, 8.0, 9.0)
NONE = QueueOptions(max_requests=0, max_seconds=0)
FULL = ModelQueuePolicy(max_queue_size=5)
TIMED = ModelQueuePolicy(default_timeout_microseconds=5)


def batching(**fields: object) -> ModelConfig:
    return ModelConfig(dynamic_batching=ModelDynamicBatching(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "bounds"),
    [
        (ModelConfig(), FLAGS),
        (batching(), FLAGS),
        (batching(default_queue_policy=TIMED), FLAGS),
        (batching(default_queue_policy=FULL), NONE),
        (batching(priority_levels=2, priority_queue_policy={1: TIMED, 2: FULL}), NONE),
        (batching(priority_levels=2, priority_queue_policy={1: TIMED}), FLAGS),
    ],
)
def test_a_queue_of_the_models_own_size_rules_alone(config: ModelConfig, bounds: QueueOptions) -> None:
    assert bounds_of(config, FLAGS) == bounds


def test_parameters_before_flags() -> None:
    parameters = {"MAX_QUEUED_REQUESTS": ModelParameter(string_value="0")}
    assert bounds_of(ModelConfig(parameters=parameters), FLAGS) == QueueOptions(0, 8.0, 9.0)
    parameters = {
        "MAX_QUEUE_SECONDS": ModelParameter(string_value="0.25"),
        "QUEUE_BURST_SECONDS": ModelParameter(string_value="60"),
    }
    assert bounds_of(ModelConfig(parameters=parameters), FLAGS) == QueueOptions(7, 0.25, 60.0)


@pytest.mark.parametrize("text", ["", "many", "-1", "inf", "nan"])
def test_what_is_no_number(text: str) -> None:
    config = ModelConfig(name="m", parameters={"MAX_QUEUE_SECONDS": ModelParameter(string_value=text)})
    (mistake,) = check_queue_bounds(config)
    assert mistake.message == (f"parameter 'MAX_QUEUE_SECONDS' of model 'm' is '{text}'; it must be a number from 0 on")


def test_what_is_a_number() -> None:
    parameters = {name: ModelParameter(string_value="0.5") for name in ("MAX_QUEUE_SECONDS", "MAX_QUEUED_REQUESTS")}
    assert not [*check_queue_bounds(ModelConfig(parameters=parameters))]
