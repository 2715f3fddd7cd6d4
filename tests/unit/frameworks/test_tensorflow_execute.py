"""Executing TensorFlow models: rows in, the same rows out, as TensorFlow's own functions have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.interface import InstanceContext
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, NotInstalled
from nerite.core.request import InferenceRequest
from nerite.core.tensor import Array, encode_bytes
from nerite.frameworks.tensorflow import TensorFlowBackend
from opened import Opened, bare, context, decoded, header, placed, request
from tensorflow_models import TYPES, VOCABULARY


class Models:
    """Opens the models that TensorFlow has made."""

    def __init__(self, artifacts: Path, folder: Path) -> None:
        self.artifacts = artifacts
        self.folder = folder

    def opened(self, name: str, config: dict[str, Any] | None = None, **parameters: str) -> Opened:
        kind = "graphdef" if name.endswith(".pb") else "savedmodel"
        placed(self.folder, self.artifacts / name, f"model.{kind}")
        given = {"platform": f"tensorflow_{kind}", **(config or {})}
        return Opened(TensorFlowBackend(), context(self.folder, given, **parameters))


@pytest.fixture
def models(tensorflow_artifacts: Path, tmp_path: Path) -> Models:
    return Models(tensorflow_artifacts, tmp_path)


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return np.arange(start, start + count * 4, dtype=np.float32).reshape(count, 4)


def test_one_request_is_answered_as_by_tensorflow(models: Models) -> None:
    opened = models.opened("scaled")
    import tensorflow as tf

    own = tf.saved_model.load(str(models.artifacts / "scaled")).signatures["serving_default"]
    expected = own(x=tf.constant(rows(3)))
    answer = opened.answer(x=rows(3))
    assert list(answer) == sorted(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(answer[name], tensor.numpy())


def test_a_gpu_that_tensorflow_does_not_see(models: Models) -> None:
    """It would compute on the CPU without a word."""
    opened = models.opened("scaled")
    with pytest.raises(
        NotInstalled, match=r"an instance is to run on a GPU, and TensorFlow \S+ sees none\. Set kind: "
    ):
        opened.model.instance(InstanceContext("m_1", "GPU"))


def test_a_batch_is_dealt_out(models: Models) -> None:
    given = [rows(count, start) for count, start in ((1, 0.0), (2, 10.0), (1, 50.0))]
    responses = models.opened("scaled").execute(*(request(x=each) for each in given))
    for each, response in zip(given, responses, strict=True):
        np.testing.assert_array_equal(decoded(response)["doubled"], each * 2)
        np.testing.assert_array_equal(decoded(response)["total"], each.sum(1, keepdims=True))


def test_outputs_that_are_asked_for(models: Models) -> None:
    opened = models.opened("scaled")
    for wanted in (["total"], ["doubled"], ["doubled", "total"]):
        assert list(opened.answer(wanted, x=rows(1))) == wanted


def test_no_rows(models: Models) -> None:
    assert models.opened("scaled").answer(x=rows(0))["doubled"].shape == (0, 4)


def test_strings_need_not_be_text(models: Models) -> None:
    answer = models.opened("shouted").answer(t=np.array([[b"a\xff"], [b"b\x00"], [b""]], object))
    assert answer["loud"].tolist() == [[b"A\xff"], [b"B\x00"], [b""]]


def test_every_type_comes_back_as_it_went(models: Models) -> None:
    given: dict[str, Any] = {}
    for name in TYPES:
        if name == "string":
            given[name] = np.array([[b"x", b""]], object)
        elif name == "bool":
            given[name] = np.array([[True, False]])
        else:
            # BF16 travels as 16-bit words.
            given[name] = np.array([[1, 100]], "uint16" if name == "bfloat16" else name)
    opened = models.opened("typed")
    answer = decoded(opened.execute(_with_bfloat16(given))[0])
    for name, value in given.items():
        assert answer[f"{name}_out"].tolist() == value.tolist(), name


def _with_bfloat16(given: dict[str, Any]) -> InferenceRequest:
    specs, data = [], []
    for name, array in given.items():
        datatype = dtypes.BF16 if name == "bfloat16" else dtypes.from_numpy(array.dtype)
        assert datatype is not None
        specs.append((name, datatype, array.shape))
        data.append(encode_bytes(array) if datatype is dtypes.BYTES else array.tobytes())
    return bare(header(specs), data)


def test_a_scalar(models: Models) -> None:
    assert models.opened("scalar").answer(x=np.ones(1, np.float32))["y"].tolist() == [2.0]


def test_dims_that_only_the_configuration_knows(models: Models) -> None:
    declared = [{"name": name, "data_type": "TYPE_FP32", "dims": [2, 2]} for name in "xy"]
    opened = models.opened("shapeless", {"max_batch_size": 4, "input": declared[:1], "output": declared[1:]})
    given = np.ones((3, 2, 2), np.float32)
    np.testing.assert_array_equal(opened.answer(x=given)["y"], given + 1)


def test_outputs_that_are_inputs_or_each_other(models: Models) -> None:
    opened = models.opened("old", TF_GRAPH_TAG="special,tagged")
    given = np.array([[1, 2]], np.float32)
    answer = opened.answer(x=given)
    assert {name: value.tolist() for name, value in answer.items()} == {
        "same": [[1.0, 2.0]],
        "y": [[3.0, 6.0]],
        "again": [[3.0, 6.0]],
    }


def test_what_is_handed_through_does_not_change_with_the_next_batch(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The buffers for large batches are used again and again; memory that lies like this TensorFlow takes as it is.
    monkeypatch.setattr("nerite.frameworks.tensorflow.session.LARGE", 1 << 10)
    opened = models.opened("old", {"max_batch_size": 4096}, TF_GRAPH_TAG="special,tagged")
    memory = np.empty((1 << 14) + 64, np.uint8)
    buffer = memory[-memory.ctypes.data % 64 :][: 1 << 14].view(np.float32).reshape(2048, 2)
    compute = opened.instance.compute
    assert compute is not None

    def computed(selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        buffer[:] = inputs["x"]
        return compute(selection, {"x": buffer})

    opened.instance.compute = computed

    def batch(value: float) -> list[Any]:
        return [request(["same"], x=np.full((1024, 2), value, np.float32)) for _ in range(2)]

    first = opened.execute(*batch(1.0))
    opened.execute(*batch(2.0))
    for response in first:
        assert (decoded(response)["same"] == 1.0).all()


def test_an_error_of_the_model(models: Models) -> None:
    opened = models.opened("picky")
    with pytest.raises(Internal) as refused:
        opened.execute(request(x=np.ones((2, 4), np.float32)))
    assert refused.value.message == (
        "Input to reshape is a tensor with 8 values, but the requested shape requires a multiple of 3"
    )
    assert opened.answer(x=np.ones((1, 3), np.float32))["y"].tolist() == [[1.0, 1.0, 1.0]]


def test_a_frozen_graph(models: Models) -> None:
    a, b = rows(2), rows(2, 5.0)
    answer = models.opened("frozen.pb").answer(b=b, a=a)
    np.testing.assert_array_equal(answer["sum"], a + b)
    np.testing.assert_array_equal(answer["halves:1"], (a - b)[:, 2:])


def test_an_input_with_a_default(models: Models) -> None:
    declared = [{"name": name, "data_type": "TYPE_FP32", "dims": [3]} for name in ("x", "y", "sum")]
    config = {"input": [declared[0], {**declared[1], "optional": True}], "output": declared[2:]}
    opened = models.opened("defaulted.pb", config)
    given = np.zeros(3, np.float32)
    assert opened.answer(x=given)["sum"].tolist() == [1.0] * 3
    assert opened.answer(x=given, y=given)["sum"].tolist() == [0.0] * 3


def test_initial_operations_are_run(models: Models) -> None:
    (models.folder / "init.json").write_text(json.dumps({"init_ops": ["fill"]}))
    config = {
        "max_batch_size": 4,
        "input": [{"name": "words", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "number", "data_type": "TYPE_INT64", "dims": [1]}],
    }
    opened = models.opened("table.pb", config, TF_INIT_OPS_FILE="init.json")
    words = np.array([[VOCABULARY[3].encode()], [b"other"]], object)
    assert opened.answer(words=words)["number"].tolist() == [[3], [-1]]


def test_an_initial_operation_that_does_not_exist(models: Models) -> None:
    (models.folder / "init.json").write_text(json.dumps({"init_ops": ["nothing"]}))
    with pytest.raises(Internal, match="'nothing'"):
        models.opened("frozen.pb", TF_INIT_OPS_FILE="init.json")


@pytest.mark.parametrize("level", [-1, 1])
def test_with_and_without_xla(models: Models, level: int) -> None:
    opened = models.opened("scaled", {"optimization": {"graph": {"level": level}}})
    np.testing.assert_array_equal(opened.answer(x=rows(2))["doubled"], rows(2) * 2)
