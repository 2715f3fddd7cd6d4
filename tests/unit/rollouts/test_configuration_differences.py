"""What follows from differences between signatures and configurations."""

from __future__ import annotations

from typing import Any

import pytest

from nerite.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInstanceGroup,
    ModelParameter,
    ModelQueuePolicy,
    ModelResponseCache,
    ModelSequenceBatching,
    ModelTransactionPolicy,
    ModelVersionPolicy,
    ModelWarmup,
)
from nerite.core import tensor as dtypes
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.rollouts.configuration_differences import (
    configuration_differences,
    policy_differences,
    signature_differences,
)
from nerite.rollouts.difference import Difference, Severity

IN = SignatureInput("IN", dtypes.FP32, (-1, 4))
OUT = SignatureOutput("OUT", dtypes.FP32, (-1,))


def signature(*tensors: SignatureInput | SignatureOutput, rows: int = 8) -> Signature:
    inputs = [each for each in tensors if isinstance(each, SignatureInput)]
    outputs = [each for each in tensors if isinstance(each, SignatureOutput)]
    return Signature("m", rows, inputs, outputs)


def told(found: Any) -> list[tuple[str, str]]:
    return [(each.severity.value, each.subject) for each in found]


def test_equal_signatures() -> None:
    assert list(signature_differences(signature(IN, OUT), signature(IN, OUT))) == []


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (IN, IN._replace(datatype=dtypes.FP64), "blocks"),
        (IN, IN._replace(dims=(3, 4)), "blocks"),
        (IN, IN._replace(dims=(-1, 5)), "blocks"),
        (IN, IN._replace(dims=(-1,)), "blocks"),
        (IN._replace(dims=(3, 4)), IN, "notes"),
        (IN, IN._replace(optional=True), "notes"),
        (IN._replace(optional=True), IN, "blocks"),
        (OUT, OUT._replace(datatype=dtypes.INT64), "blocks"),
        (OUT, OUT._replace(dims=(3,)), "notes"),
        (OUT._replace(dims=(3,)), OUT, "blocks"),
        (OUT._replace(dims=(3,)), OUT._replace(dims=(4,)), "blocks"),
    ],
)
def test_a_tensor_that_differs(before: Any, after: Any, wanted: str) -> None:
    (found,) = signature_differences(signature(before), signature(after))
    assert found.severity.value == wanted
    assert f"'{before.name}'" in found.subject


def test_tensors_that_come_and_go() -> None:
    more = SignatureInput("MORE", dtypes.BOOL, (1,))
    extra = SignatureOutput("EXTRA", dtypes.BOOL, (1,))
    assert told(signature_differences(signature(), signature(more, extra))) == [
        ("blocks", "input 'MORE'"),
        ("notes", "output 'EXTRA'"),
    ]
    assert told(signature_differences(signature(), signature(more._replace(optional=True)))) == [
        ("notes", "input 'MORE'")
    ]
    assert told(signature_differences(signature(more, extra), signature())) == [
        ("blocks", "input 'MORE'"),
        ("blocks", "output 'EXTRA'"),
    ]


@pytest.mark.parametrize(("before", "after", "wanted"), [(8, 0, "blocks"), (8, 4, "blocks"), (4, 8, "notes")])
def test_batch_sizes(before: int, after: int, wanted: str) -> None:
    (found,) = signature_differences(signature(rows=before), signature(rows=after))
    assert (found.severity.value, found.baseline, found.candidate) == (wanted, str(before), str(after))


def test_the_first_label_that_differs_is_shown() -> None:
    before, after = (OUT._replace(labels=labels) for labels in (("cat", "dog"), ("cat", "cow", "dog")))
    (found,) = signature_differences(signature(before), signature(after))
    assert found == Difference(
        Severity.WARNS,
        "labels of output 'OUT'",
        "line 2: dog",
        "line 2: cow",
        "Clients that ask for classes get other names.",
    )


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(name="m", backend="python", **fields)


def batching(**fields: Any) -> ModelConfig:
    return config(dynamic_batching=ModelDynamicBatching(**fields))


SEQUENCES = config(sequence_batching=ModelSequenceBatching(max_sequence_idle_microseconds=5))
STREAMS = config(model_transaction_policy=ModelTransactionPolicy(decoupled=True))
LATE = ModelQueuePolicy(default_timeout_microseconds=5000, timeout_action="DELAY")


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (config(), STREAMS, ("blocks", "decoupled")),
        (STREAMS, config(), ("blocks", "decoupled")),
        (config(), SEQUENCES, ("blocks", "scheduler")),
        (SEQUENCES, config(), ("blocks", "scheduler")),
        (config(), batching(), ("warns", "scheduler")),
        (SEQUENCES, config(sequence_batching=ModelSequenceBatching()), ("warns", "max_sequence_idle_microseconds")),
        (batching(), batching(priority_levels=2), ("warns", "priority_levels")),
        (batching(), batching(default_queue_policy=LATE), ("warns", "default_queue_policy, timeout")),
        (batching(), batching(priority_queue_policy={1: LATE}), ("warns", "queue policy of priority 1, timeout")),
        (
            batching(),
            batching(default_queue_policy=ModelQueuePolicy(max_queue_size=3)),
            ("warns", "default_queue_policy, max_queue_size"),
        ),
        (config(), config(response_cache=ModelResponseCache(enable=True)), ("warns", "response_cache")),
        (
            config(instance_group=(ModelInstanceGroup(kind="KIND_CPU", count=2),)),
            config(instance_group=(ModelInstanceGroup(kind="KIND_GPU", count=1, gpus=(0,)),)),
            ("warns", "instances"),
        ),
        (config(), config(parameters={"X": ModelParameter(string_value="1")}), ("notes", "parameter 'X'")),
        (config(model_warmup=(ModelWarmup(name="w"),)), config(), ("notes", "model_warmup")),
        (config(), ModelConfig(name="m", backend="onnxruntime"), ("warns", "backend")),
    ],
)
def test_a_setting_that_differs(before: ModelConfig, after: ModelConfig, wanted: tuple[str, str]) -> None:
    assert list(configuration_differences(before, before)) == []
    assert told(configuration_differences(before, after)) == [wanted]


def test_timeouts_are_shown_as_they_act() -> None:
    (found,) = configuration_differences(batching(), batching(default_queue_policy=LATE))
    assert (found.baseline, found.candidate) == ("none", "5000 us, then delay")


@pytest.mark.parametrize(
    ("policy", "candidate", "warned"),
    [
        (None, 2, False),
        (ModelVersionPolicy(latest=ModelVersionPolicy.Latest(num_versions=1)), 2, False),
        (ModelVersionPolicy(latest=ModelVersionPolicy.Latest(num_versions=1)), 0, True),
        (ModelVersionPolicy(specific=ModelVersionPolicy.Specific(versions=(1,))), 2, True),
        (ModelVersionPolicy(specific=ModelVersionPolicy.Specific(versions=(1, 2))), 2, False),
    ],
)
def test_what_the_version_policy_selects_afterwards(
    policy: ModelVersionPolicy | None, candidate: int, warned: bool
) -> None:
    found = list(policy_differences(policy, [1], 1, candidate))
    assert [each.subject for each in found] == ["version_policy"] * warned
