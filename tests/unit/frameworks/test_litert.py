"""LiteRT models: what is completed, what is refused, and rows in, the same rows out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerite.backends.interface import InstanceContext
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.frameworks import litert
from nerite.frameworks.litert import LiteRtBackend
from opened import Opened, context, decoded, placed, request
from tensorflow_models import VOCABULARY


class Models:
    """Opens the models that TensorFlow has converted."""

    def __init__(self, artifacts: Path, folder: Path) -> None:
        self.artifacts = artifacts
        self.folder = folder

    def opened(self, name: str, config: dict[str, Any] | None = None, **parameters: str) -> Opened:
        if not (self.folder / "1").exists():
            placed(self.folder, self.artifacts / f"{name}.tflite", "model.tflite")
        return Opened(LiteRtBackend(), context(self.folder, config, **parameters))

    def refusal(self, name: str, config: dict[str, Any] | None = None, **parameters: str) -> NeriteError:
        with pytest.raises(NeriteError) as refused:
            self.opened(name, config, **parameters)
        return refused.value


@pytest.fixture
def models(tensorflow_artifacts: Path, tmp_path: Path) -> Models:
    return Models(tensorflow_artifacts, tmp_path)


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return np.arange(start, start + count * 4, dtype=np.float32).reshape(count, 4)


def test_a_model_is_completed_from_its_signature(models: Models) -> None:
    config = models.opened("scaled").config
    assert config["max_batch_size"] == 4
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
    assert config["output"] == [
        {"name": "doubled", "data_type": "TYPE_FP32", "dims": [4]},
        {"name": "total", "data_type": "TYPE_FP32", "dims": [1]},
    ]


def test_batches_of_every_size_one_after_the_other(models: Models) -> None:
    opened = models.opened("scaled")
    for count in (1, 3, 3, 2, 0):
        given = rows(count)
        answer = opened.answer(x=given)
        np.testing.assert_array_equal(answer["doubled"], given * 2)
        np.testing.assert_array_equal(answer["total"], given.sum(1, keepdims=True))
    assert list(opened.answer(["total"], x=rows(1))) == ["total"]


def test_a_batch_is_dealt_out(models: Models) -> None:
    given = [rows(count, start) for count, start in ((1, 0.0), (2, 10.0), (1, 50.0))]
    responses = models.opened("scaled").execute(*(request(x=each) for each in given))
    for each, response in zip(given, responses, strict=True):
        np.testing.assert_array_equal(decoded(response)["doubled"], each * 2)


def test_an_answer_stays_as_it_was(models: Models) -> None:
    opened = models.opened("scaled")
    first = opened.answer(x=rows(1))["doubled"]
    opened.answer(x=rows(1, 100.0))
    np.testing.assert_array_equal(first, rows(1) * 2)


def test_inputs_go_by_their_names(models: Models) -> None:
    a, b = np.ones((2, 3), np.float32), np.full((2, 3), 10, np.float32)
    for given in ({"a": a, "b": b}, {"b": b, "a": a}):
        np.testing.assert_array_equal(models.opened("pair").answer(**given)["both"], a + 2 * b)


def test_the_names_of_tensors_may_be_used(models: Models) -> None:
    declared = {"input": [{"name": "serving_default_x:0", "data_type": "TYPE_FP32", "dims": [4]}], "max_batch_size": 2}
    opened = models.opened("scaled", declared)
    assert [output["name"] for output in opened.config["output"]] == ["PartitionedCall:0", "PartitionedCall:1"]
    answer = opened.answer(**{"serving_default_x:0": rows(1)})
    np.testing.assert_array_equal(answer["PartitionedCall:0"], rows(1) * 2)


@pytest.mark.parametrize(("signature", "factor"), [("double", 2), ("triple", 3)])
def test_one_of_several_signatures(models: Models, signature: str, factor: int) -> None:
    opened = models.opened("two", SIGNATURE=signature)
    for count in (2, 1):
        np.testing.assert_array_equal(opened.answer(x=rows(count))["y"], rows(count) * factor)


def test_several_signatures_and_none_is_chosen(models: Models) -> None:
    assert models.refusal("two").message == (
        "unable to load model 'm', it has several signatures. The signatures there are: double, triple. Set parameter "
        "SIGNATURE to one"
    )
    assert "expected 'half' signature" in models.refusal("two", SIGNATURE="half").message


def test_a_model_for_one_row_is_stretched_where_that_works(models: Models) -> None:
    opened = models.opened("fixed", {"max_batch_size": 8})
    assert opened.config["input"][0]["dims"] == [3]
    for count in (8, 1):
        given = rows(count)[:, :3]
        np.testing.assert_array_equal(opened.answer(x=given)["y"], given + 1)


def test_a_model_for_one_row_is_left_as_it_is_without_being_asked(models: Models) -> None:
    assert models.opened("fixed").config["input"][0]["dims"] == [1, 3]


def test_a_model_that_cannot_be_stretched(models: Models) -> None:
    refused = models.refusal("stubborn", {"max_batch_size": 8})
    assert "export the model with a dynamic first dimension, or set max_batch_size: 0" in refused.message


def test_strings_out(models: Models) -> None:
    answer = models.opened("words").answer(n=np.array([[1], [3]], np.int32))
    assert [element.decode() for element in answer["word"][:, 0]] == [VOCABULARY[1], VOCABULARY[3]]


def test_strings_in_need_not_be_text(models: Models) -> None:
    given = np.array([[b"\xff\x00", b""]], object)
    assert models.opened("upright").answer(t=given)["out"].tolist() == [[[b"\xff\x00"], [b""]]]


def test_integers_and_truth(models: Models) -> None:
    answer = models.opened("flags").answer(x=np.array([[1, 3]]))
    assert answer["high"].tolist() == [[False, True]]


def test_quantised_tensors_stay_integers_and_the_log_says_what_they_mean(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    opened = models.opened("quantised")
    assert opened.config["input"][0]["data_type"] == opened.config["output"][0]["data_type"] == "TYPE_INT8"
    from ai_edge_litert.interpreter import Interpreter

    own = Interpreter(str(models.artifacts / "quantised.tflite"))
    own.allocate_tensors()
    given = np.array([[-128, 0, 64, 127]], np.int8)
    own.set_tensor(own.get_input_details()[0]["index"], given)
    own.invoke()
    np.testing.assert_array_equal(opened.answer(x=given)["y"], own.get_tensor(own.get_output_details()[0]["index"]))
    assert any("'x' means 0.00" in message and "* (int8 + 128)" in message for message in caplog.messages)


def test_operators_of_tensorflow_are_refused_with_what_to_do(models: Models) -> None:
    refused = models.refusal("flex")
    assert isinstance(refused, Unsupported)
    assert refused.message.endswith(
        "It was converted with SELECT_TF_OPS, and LiteRT does not have TensorFlow's operators. Convert it without "
        "them, or serve the SavedModel with the backend tensorflow"
    )


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as refused:
        LiteRtBackend().complete(context(tmp_path))
    assert refused.value.message == f"unable to find '{tmp_path}/1/model.tflite' for model instance 'm'"


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.tflite").write_bytes(b"half")
    with pytest.raises(InvalidArgument, match="is not a model for LiteRT") as refused:
        LiteRtBackend().complete(context(tmp_path))
    assert "it has 4 bytes. Was it copied whole" in refused.value.message


def test_a_model_that_was_cut_off(models: Models, tmp_path: Path) -> None:
    whole = (models.artifacts / "scaled.tflite").read_bytes()
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.tflite").write_bytes(whole[: len(whole) // 2])
    assert isinstance(models.refusal("scaled"), Internal)


def test_a_configuration_that_says_something_else(models: Models) -> None:
    declared = {"input": [{"name": "x", "data_type": "TYPE_INT32", "dims": [4]}], "max_batch_size": 2}
    assert models.refusal("scaled", declared).message == (
        "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32. "
        "Set data_type: TYPE_FP32"
    )


# ---- The plan ----


def threads(folder: Path, accelerator: dict[str, Any] | None = None, **parameters: str) -> int:
    if not (folder / "1").exists():
        placed(folder, folder / "nothing", "model.tflite")
        (folder / "nothing").touch()
    accelerators = {"execution_accelerators": {"cpu_execution_accelerator": [accelerator] if accelerator else []}}
    given = context(folder, {"optimization": accelerators}, **parameters)
    return litert.interpreter_threads(given, InstanceContext("m_0"))


def test_how_wide_an_interpreter_is(tmp_path: Path) -> None:
    assert threads(tmp_path) >= 1
    assert threads(tmp_path, tflite_num_threads="7") == 7
    assert threads(tmp_path, {"name": "xnnpack", "parameters": {"num_threads": "3"}}) == 3


def test_accelerators_of_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads(tmp_path, {"name": "armnn"})
    assert caplog.messages == ["'m' asks for the accelerator 'armnn'; XNNPACK is used in its place"]
    with pytest.raises(InvalidArgument, match="unknown Execution Accelerator 'tpu' is requested"):
        threads(tmp_path, {"name": "tpu"})
    with pytest.raises(InvalidArgument, match="must be non-negative number for tflite model 'm'"):
        threads(tmp_path, tflite_num_threads="-1")


def test_no_gpu(models: Models) -> None:
    with pytest.raises(InvalidArgument, match=r"instance 'm_1' is for a GPU, .*write kind: KIND_CPU"):
        models.opened("scaled").model.instance(InstanceContext("m_1", "GPU"))
