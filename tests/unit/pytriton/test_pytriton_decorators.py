"""Decorators of inference callables, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from nerite.pytriton.decorators import (
    ConstantPadder,
    TritonContext,
    TritonModelConfig,
    batch,
    current_context,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
    triton_context,
)
from nerite.pytriton.exceptions import (
    PyTritonBadParameterError,
    PyTritonModelConfigError,
    PyTritonRuntimeError,
    PyTritonValidationError,
)
from nerite.pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction
from nerite.pytriton.model_config.model_config import named, triton_config
from nerite.pytriton.proxy.types import Request


def request(**arrays: Any) -> Request:
    return Request({name: np.array(value) for name, value in arrays.items()}, {})


@contextmanager
def bound(*inputs: Tensor, config: ModelConfig | None = None) -> Iterator[None]:
    """Run the block as a model that is bound."""
    outputs = [Tensor((-1,), np.float64, "OUT")]
    context = TritonContext(TritonModelConfig("model", inputs, outputs, config or ModelConfig()))
    token = current_context.set(context)
    yield
    current_context.reset(token)


def plain(results: Any) -> Any:
    return [{name: array.tolist() for name, array in each.items()} for each in results]


def test_batch_joins_and_divides() -> None:
    seen = []

    @batch
    def double(a: Any, b: Any) -> Any:
        seen.append((a.shape, b.shape))
        return {"sum": a + b}

    found = double([request(a=[[1]], b=[[2]]), request(a=[[3], [4]], b=[[5], [6]])])
    assert plain(found) == [{"sum": [[3]]}, {"sum": [[8], [10]]}]
    assert seen == [((3, 1), (3, 1))]


def test_batch_of_methods_generators_and_coroutines() -> None:
    class Model:
        @batch
        def __call__(self, a: Any) -> Any:
            yield {"a": a}
            yield {"a": a + 1}

    @batch
    async def later(a: Any) -> Any:
        return {"a": a}

    assert [plain(part) for part in Model()([request(a=[[1]])])] == [[{"a": [[1]]}], [{"a": [[2]]}]]
    assert plain(asyncio.run(later([request(a=[[1]])]))) == [{"a": [[1]]}]


def test_batch_refuses_what_does_not_fit() -> None:
    @batch
    def cut(a: Any) -> Any:
        return {"a": a[:1]}

    with pytest.raises(ValueError, match="Output 'a' has 1 rows, and the batch has 2"):
        cut([request(a=[[1], [2]])])
    with pytest.raises(PyTritonValidationError, match="add @group_by_keys"):
        cut([request(a=[[1]]), request(a=[[1]], b=[[2]])])
    with pytest.raises(PyTritonRuntimeError, match="put it above @batch"):
        cut()


def test_lists_of_outputs_need_the_configuration() -> None:
    @batch
    def double(a: Any) -> Any:
        return [a]

    with bound(Tensor((1,), np.int64, "a")):
        assert plain(double([request(a=[[1]])])) == [{"OUT": [[1]]}]
    with pytest.raises(PyTritonValidationError, match="not bound"):
        double([request(a=[[1]])])


def test_sample() -> None:
    @sample
    def double(a: Any) -> Any:
        return {"a": a * 2}

    assert plain(double([request(a=[1, 2])])) == [{"a": [2, 4]}]


def test_groups_keep_the_order_of_requests() -> None:
    calls = []

    @group_by_keys
    @batch
    def add(a: Any, b: Any = 0) -> Any:
        calls.append(len(a))
        return {"sum": a + b}

    found = add([request(a=[[1]]), request(a=[[2]], b=[[3]]), request(a=[[4]])])
    assert plain(found) == [{"sum": [[1]]}, {"sum": [[5]]}, {"sum": [[4]]}]
    assert calls == [2, 1]


def test_groups_of_equal_values() -> None:
    @batch
    @group_by_values("t")
    @first_value("t")
    def scaled(a: Any, t: Any) -> Any:
        assert np.ndim(t) == 0
        return {"a": a * t}

    found = scaled([request(a=[[1], [2]], t=[[2], [3]]), request(a=[[5]], t=[[2]])])
    assert plain(found) == [{"a": [[2], [6]]}, {"a": [[10]]}]


def test_groups_of_different_shapes_are_padded() -> None:
    @batch
    @group_by_values("t", pad_fn=ConstantPadder(0))
    def repeated(t: Any) -> Any:
        return {"a": np.repeat(t, t[0, 0], axis=1)}

    assert plain(repeated([request(t=[[1], [3]])])) == [{"a": [[1, 0, 0], [3, 3, 3]]}]


def test_first_values_differ() -> None:
    @batch
    @first_value("t")
    def scaled(t: Any) -> Any:
        return {"t": t}

    with pytest.raises(PyTritonRuntimeError, match="The values of 't' differ"):
        scaled([request(t=[[1], [2]])])


def test_optional_inputs_are_filled() -> None:
    @fill_optionals(t=np.array([2.0]))
    @batch
    def scaled(a: Any, t: Any) -> Any:
        return {"a": a * t}

    with bound(Tensor((1,), np.float64, "a"), Tensor((1,), np.float64, "t", optional=True)):
        assert plain(scaled([request(a=[[1.0], [2.0]]), request(a=[[1.0]], t=[[5.0]])])) == [
            {"a": [[2.0], [4.0]]},
            {"a": [[5.0]]},
        ]
    with bound(Tensor((1,), np.float64, "a")), pytest.raises(PyTritonBadParameterError, match="no inputs t"):
        scaled([request(a=[[1.0]])])
    with pytest.raises(PyTritonBadParameterError, match="make it a numpy array"):
        fill_optionals(t=[2.0])  # type: ignore[arg-type]


def test_batches_are_padded_to_preferred_sizes() -> None:
    seen = []

    @batch
    @pad_batch
    def double(a: Any) -> Any:
        seen.append(len(a))
        return {"a": a * 2}

    config = ModelConfig(max_batch_size=8, batcher=DynamicBatcher(preferred_batch_size=[4]))
    with bound(Tensor((1,), np.int64, "a"), config=config):
        assert plain(double([request(a=[[1], [2], [3]])])) == [{"a": [[2], [4], [6]]}]
        double([request(a=[[1]] * 5)])
    assert seen == [4, 8]


def test_the_context() -> None:
    @triton_context
    def name(requests: Any, triton_context: Any) -> Any:
        return triton_context.model_config.model_name

    with bound(Tensor((1,), np.int64, "a")):
        assert name([]) == "model"


def test_the_configuration_of_a_model() -> None:
    policy = QueuePolicy(timeout_action=TimeoutAction.DELAY, max_queue_size=5)
    config = ModelConfig(
        max_batch_size=16,
        batcher=DynamicBatcher(preferred_batch_size=[4], default_queue_policy=policy, max_queue_delay_microseconds=9),
        response_cache=True,
        decoupled=True,
    )
    inputs = named([Tensor((-1,), np.float32), Tensor((1,), bytes, "text", optional=True)], "INPUT")
    found = triton_config("model", inputs, named([Tensor((2,), "int32")], "OUTPUT"), config, 2)
    assert [(each["name"], each["data_type"], each["dims"]) for each in found["input"] + found["output"]] == [
        ("INPUT_1", "TYPE_FP32", [-1]),
        ("text", "TYPE_STRING", [1]),
        ("OUTPUT_1", "TYPE_INT32", [2]),
    ]
    assert found["max_batch_size"] == 16
    assert found["dynamic_batching"]["default_queue_policy"]["timeout_action"] == "DELAY"
    assert found["instance_group"] == [{"count": 2, "kind": "KIND_CPU"}]
    assert found["model_transaction_policy"] == {"decoupled": True}
    alone = triton_config("model", inputs, inputs, ModelConfig(batching=False), 1)
    assert alone["max_batch_size"] == 0
    assert "dynamic_batching" not in alone


def test_configurations_that_are_refused() -> None:
    with pytest.raises(PyTritonModelConfigError, match="is not a type that tensors can have"):
        Tensor((1,), np.complex64)
    with pytest.raises(PyTritonModelConfigError, match="have the same name"):
        named([Tensor((1,), int, "a"), Tensor((1,), int, "a")], "INPUT")
    with pytest.raises(PyTritonModelConfigError, match="must be 1 or more"):
        triton_config("model", [], [], ModelConfig(max_batch_size=0), 1)
