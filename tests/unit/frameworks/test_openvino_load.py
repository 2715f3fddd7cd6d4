"""Loading OpenVINO models: what is completed from the model, how it is fitted, and every way in which it is refused."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from openvino_models import (
    EXACT,
    Opened,
    context,
    declared,
    identity,
    mapped,
    model,
    network,
    ops,
    ov,
    parameter,
    parameters,
    save,
    scaled,
)

import onnx_models
from configs import as_backends_get_it
from foreign_models import paddle, tflite
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.frameworks.openvino import OpenVinoBackend, compile

FLOAT4 = {"data_type": "TYPE_FP32", "dims": [4]}
IN, OUT = {"name": "IN", **FLOAT4}, {"name": "OUT", **FLOAT4}


def complete(directory: Path, made: Any, config: dict[str, Any] | None = None, **settings: str) -> dict[str, Any]:
    save(directory, made)
    completed = dict(OpenVinoBackend().complete(context(directory, config, settings)))
    del completed["parameters"]
    return completed


def without_parameters(config: dict[str, Any]) -> dict[str, Any]:
    given = as_backends_get_it(config)
    del given["parameters"]
    return given


def refusal(directory: Path, made: Any = None, config: dict[str, Any] | None = None) -> NeriteError:
    with pytest.raises(NeriteError) as refused:
        Opened(directory, made, config)
    return refused.value


# ---- Completion ----


def test_a_model_that_can_batch_is_completed_with_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    added = {"max_batch_size": 4, "dynamic_batching": {}, "input": [IN], "output": [OUT]}
    assert complete(tmp_path, scaled()) == {**without_parameters({}), **added}
    assert "autofilled max_batch_size to 4 for model 'm'" in caplog.text
    assert complete(tmp_path, scaled(), **{"default-max-batch-size": "1"})["max_batch_size"] == 1


def test_a_model_with_a_fixed_first_dimension_is_completed_without(tmp_path: Path) -> None:
    fixed = {"data_type": "TYPE_FP32", "dims": [1, 4]}
    added = {"input": [{"name": "IN", **fixed}], "output": [{"name": "OUT", **fixed}]}
    assert complete(tmp_path, scaled(dims=[1, 4])) == {**without_parameters({}), **added}


def test_a_layout_tells_that_the_first_dimension_is_the_batch(tmp_path: Path) -> None:
    made = scaled(dims=[1, 4])
    made.inputs[0].node.layout = ov.Layout("NC")
    made.outputs[0].node.layout = ov.Layout("NC")
    completed = complete(tmp_path, made)
    assert (completed["max_batch_size"], completed["input"]) == (4, [IN])
    opened = Opened(tmp_path)
    assert opened.answer(IN=np.ones((3, 4), np.float32))["OUT"].shape == (3, 4)


def test_what_the_configuration_says_stays(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_batch_size": 16, "sequence_batching": {"direct": {}}, "input": [IN]}
    assert complete(tmp_path, scaled(), given) == {**without_parameters(given), "output": [OUT]}


def test_completion_is_skipped_when_both_sides_are_given(tmp_path: Path) -> None:
    given = context(tmp_path, declared("TYPE_FP32"))
    # There is no model at all, and nobody looks.
    assert OpenVinoBackend().complete(given) == given.config


def test_tensors_without_a_name_have_that_of_their_node(tmp_path: Path) -> None:
    given = ops.parameter(ov.PartialShape([-1, 4]), np.float32, name="given")
    result = ops.result(ops.relu(given), name="result")
    completed = complete(tmp_path, ov.Model([result], [given], "model"))
    assert [completed[side][0]["name"] for side in ("input", "output")] == ["given", "result"]


def test_each_name_of_a_tensor_will_do(tmp_path: Path) -> None:
    made = mapped()
    made.inputs[0].add_names({"A", "Z"})
    for name in ("A", "IN", "Z"):
        config = declared("TYPE_FP32")
        config["input"][0]["name"] = name
        assert Opened(tmp_path, made, config).answer(**{name: np.float32([[-1, 2, 3, 4]])})["OUT"][0][0] == 0


def test_a_tensor_that_is_several_outputs(tmp_path: Path) -> None:
    given = parameter("IN")
    node = ops.relu(given)
    opened = Opened(tmp_path, model([given], A=node, B=node))
    assert [output["name"] for output in opened.config["output"]] == ["A", "B"]
    answer = opened.answer(IN=np.float32([[-1, 2, 3, 4]]))
    assert answer["A"].tolist() == answer["B"].tolist() == [[0, 2, 3, 4]]


def test_a_shape_that_nobody_knows_has_to_be_declared(tmp_path: Path) -> None:
    given = ops.parameter(ov.PartialShape.dynamic(), np.float32, name="x")
    given.output(0).set_names({"IN"})
    made = model([given], OUT=ops.relu(given))
    assert refusal(tmp_path, made).message == (
        "the model does not say how many dimensions 'IN' has: declare it, with its dims"
    )
    assert Opened(tmp_path, made, declared("TYPE_FP32")).answer(IN=np.ones((2, 4), np.float32))["OUT"].shape == (2, 4)


def test_the_model_of_completion_is_the_one_that_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        compile, "read_model", lambda source, read=compile.read_model: made.append(source) or read(source)
    )
    Opened(tmp_path, scaled())
    assert len(made) == 1


def test_a_model_that_changed_in_between_is_read_again(tmp_path: Path) -> None:
    backend = OpenVinoBackend()
    first = context(tmp_path)
    save(tmp_path, scaled(2.0))
    completed = backend.complete(first)
    save(tmp_path, scaled(5.0))
    opened = Opened.__new__(Opened)
    opened.model = backend.open(ModelContext("m", 1, tmp_path, completed, {}, first.memo))
    opened.instance = opened.model.instance(InstanceContext("m_0"))
    assert opened.answer(IN=np.ones((1, 4), np.float32))["OUT"].tolist() == [[5, 5, 5, 5]]


# ---- Files ----


@pytest.mark.parametrize(("name", "content"), [("model.tflite", tflite()), ("model.pdmodel", paddle())])
def test_formats_of_other_frameworks(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / name).write_bytes(content)
    opened = Opened(tmp_path, None, {"default_model_filename": name})
    assert opened.config["output"][0]["name"] == "Y"
    assert opened.answer(X=np.float32([[-1, 2, -3, 4]]))["Y"].tolist() == [[0, 2, 0, 4]]


def test_onnx(tmp_path: Path) -> None:
    onnx_models.save(tmp_path, onnx_models.add_sub())
    opened = Opened(tmp_path, None, {"default_model_filename": "model.onnx"})
    ones = np.ones((2, 4), np.float32)
    assert opened.answer(A=ones, B=ones)["SUM"].tolist() == [[2] * 4] * 2


def test_a_missing_file(tmp_path: Path) -> None:
    error = refusal(tmp_path)
    assert isinstance(error, Unavailable)
    assert error.message.startswith(f"unable to find '{tmp_path}/1/model.xml' for model 'm'. It may also be model.onnx")


BROKEN: dict[str, tuple[str, str]] = {
    "no weights": ("", "The weights lie in a file of their own: copy '{folder}/model.bin', too"),
    "half of the weights": ("", "'{folder}/model.bin' is cut off, or of another model: copy both files once more"),
    "half of the model": ("", "Is '{folder}/model.xml' complete? Copy or export it again"),
    "nothing": ("", "'{folder}/model.xml' is empty: copy it once more"),
    "something else": ("", "'{folder}/model.xml' is no OpenVINO IR: export the model with openvino.save_model"),
    "an unknown operator": ("FancyOp", "Install a newer OpenVINO, or name a library that has it: CPU_EXTENSION_PATH"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_model_is_refused_with_what_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str) -> None:
    path = save(tmp_path, scaled())
    weights, text = path.with_suffix(".bin"), path.read_bytes()
    match how:
        case "no weights":
            weights.unlink()
        case "half of the weights":
            weights.write_bytes(weights.read_bytes()[:2])
        case "half of the model":
            path.write_bytes(text[: len(text) // 2])
        case "nothing":
            path.write_bytes(b"")
        case "something else":
            path.write_bytes(b"<html><body>404</body></html>")
        case "an unknown operator":
            path.write_bytes(text.replace(b'type="Multiply"', b'type="FancyOp"'))
    error = refusal(tmp_path)
    said, remedy = BROKEN[how]
    assert isinstance(error, Internal)
    assert error.message.startswith("openvino error in reading model : ")
    assert said in error.message
    assert error.message.endswith(remedy.format(folder=path.parent))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["model.onnx", "model.tflite", "model.pdmodel"])
def test_a_broken_file_of_another_framework(tmp_path: Path, name: str) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / name).write_bytes(b"garbage")
    assert name in refusal(tmp_path, None, {"default_model_filename": name}).message


def test_an_operator_that_openvino_cannot_convert(tmp_path: Path) -> None:
    proto = onnx_models.model(
        [onnx_models.node("Fancy", ["IN"], ["OUT"], domain="own")],
        [onnx_models.tensor("IN", ["N", 4])],
        [onnx_models.tensor("OUT", ["N", 4])],
    )
    proto.opset_import.append(onnx.helper.make_opsetid("own", 1))
    onnx_models.save(tmp_path, proto)
    assert refusal(tmp_path, None, {"default_model_filename": "model.onnx"}).message.endswith(
        "operations: own.Fancy. Serve it with another backend, or name a library that has them: CPU_EXTENSION_PATH"
    )


# ---- Fitting ----


def test_a_batch_size_of_the_configuration_frees_the_first_dimension(tmp_path: Path) -> None:
    opened = Opened(tmp_path, mapped(dims=(1, 4)), {"max_batch_size": 8})
    assert opened.config["input"] == [IN]
    assert opened.answer(IN=np.ones((5, 4), np.float32))["OUT"].shape == (5, 4)


def test_a_model_that_cannot_batch(tmp_path: Path) -> None:
    fixed = mapped(lambda node: ops.reshape(node, ops.constant([2, 2]), special_zero=False), (1, 4))
    config = declared("TYPE_FP32")
    config["output"][0]["dims"] = [2]
    error = refusal(tmp_path, fixed, config)
    assert "the first dimension must be -1; but shape expected by the model is [2,2]" in error.message
    assert error.message.endswith("or set max_batch_size: 0 and dims: [2, 2]")


def test_reshaping_to_what_the_configuration_says(tmp_path: Path) -> None:
    config = {**declared("TYPE_FP32", [2, -1]), **parameters(RESHAPE_IO_LAYERS="YES")}
    opened = Opened(tmp_path, mapped(dims=(1, 2, 8)), config)
    assert opened.answer(IN=np.ones((3, 2, 5), np.float32))["OUT"].shape == (3, 2, 5)
    narrow = mapped(lambda node: ops.matmul(node, ops.constant(np.ones((8, 8), np.float32)), False, False), (1, 2, 8))
    error = refusal(tmp_path, narrow, {**declared("TYPE_FP32", [2, 5]), **parameters(RESHAPE_IO_LAYERS="YES")})
    assert error.message.startswith("openvino error in reshaping model : ")
    assert error.message.endswith(". Leave RESHAPE_IO_LAYERS out")


def test_without_reshaping_another_shape_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, mapped(dims=(1, 8)), declared("TYPE_FP32", [5])).message == (
        "model 'm', tensor 'IN': the model expects 2 dimensions (shape [-1,8]) but the model configuration specifies 2 "
        "dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
        "making complete shape [-1,5]). Set dims: [8]"
    )


def test_what_the_model_leaves_open_of_an_output_the_configuration_may_say(tmp_path: Path) -> None:
    given, size = parameter("IN"), parameter("SIZE", (2,), ov.Type.i64)
    made = model([given, size], OUT=ops.reshape(given, size, special_zero=False))
    config = declared("TYPE_FP32", (2, 4), 0)
    config["input"].append({"name": "SIZE", "data_type": "TYPE_INT64", "dims": [2]})
    opened = Opened(tmp_path, made, config)
    assert opened.answer(IN=np.ones((2, 4), np.float32), SIZE=np.array([2, 4]))["OUT"].shape == (2, 4)


def test_numbers_are_no_strings(tmp_path: Path) -> None:
    assert refusal(tmp_path, mapped(), declared("TYPE_STRING")).message == (
        "unable to load model 'm', configuration expects datatype TYPE_STRING for input 'IN', model provides "
        "TYPE_FP32. Set data_type: TYPE_FP32"
    )


def test_an_element_type_that_the_protocol_does_not_have(tmp_path: Path) -> None:
    made = identity(element=ov.Type.u4)
    error = refusal(tmp_path, made)
    assert isinstance(error, Unsupported)
    assert error.message.endswith(
        "is of type u4, and the protocol has no data type for its elements. Declare it with the data_type that it is "
        "to be converted to"
    )


def test_inputs_and_outputs_that_the_model_does_not_have(tmp_path: Path) -> None:
    config = declared("TYPE_FP32")
    assert refusal(tmp_path, mapped(), {**config, "input": [IN, {**IN, "name": "MORE"}]}).message == (
        "unable to load model 'm', configuration expects 2 inputs, model provides 1. The model has no input: MORE"
    )
    assert refusal(tmp_path, mapped(), {**config, "output": [{**OUT, "name": "NONE"}]}).message == (
        "unexpected inference output 'NONE', allowed outputs are: OUT"
    )


# ---- Compiling ----


def test_instances_on_the_same_cores_share_what_was_compiled(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled())
    opened.model.instance(InstanceContext("m_1"))
    assert len(opened.model.shared_copies) == 1
    opened.model.instance(InstanceContext("m_2", cores=(0,)))
    assert len(opened.model.shared_copies) == 2


def test_a_closed_model_keeps_no_file_though_somebody_knows_it(tmp_path: Path) -> None:
    opened = Opened(tmp_path, network())
    assert str(tmp_path / "1" / "model.bin") in Path("/proc/self/maps").read_text()
    opened.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_an_instance_on_a_gpu_is_refused(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled())
    with pytest.raises(InvalidArgument) as refused:
        opened.model.instance(InstanceContext("m_1", "GPU"))
    assert refused.value.message == (
        "unable to load model 'm', Triton OpenVINO backend supports only Kind CPU and AUTO. Set kind: KIND_CPU, and "
        "the parameter TARGET_DEVICE to the device"
    )


def test_a_device_that_there_is_not(tmp_path: Path) -> None:
    error = refusal(tmp_path, scaled(), parameters(TARGET_DEVICE="TPU"))
    assert error.message.startswith('openvino error in configuring openvino core : Device with "TPU" name is not reg')
    assert "TARGET_DEVICE may be one of: CPU" in error.message


def test_a_virtual_device(tmp_path: Path) -> None:
    config = {"parameters": {"TARGET_DEVICE": {"string_value": "hetero:cpu"}}}
    assert Opened(tmp_path, scaled(), config).answer(IN=np.zeros((1, 4), np.float32))["OUT"].tolist() == [[0] * 4]


def test_what_was_compiled_is_kept_in_a_folder(tmp_path: Path) -> None:
    for place, config, settings in (
        ("one", parameters(CACHE_DIR=str(tmp_path / "one")), {}),
        ("two", {"parameters": EXACT}, {"cache-dir": str(tmp_path / "two")}),
    ):
        for _ in range(2):
            opened = Opened(tmp_path / "m", scaled(), config, settings)
            assert opened.answer(IN=np.ones((1, 4), np.float32))["OUT"].tolist() == [[2] * 4]
        assert len(list((tmp_path / place).glob("*.blob"))) == 1
        (compiled,) = opened.model.shared_copies.values()
        assert compiled.get_property("LOADED_FROM_CACHE")


def test_a_library_of_operators_that_there_is_not(tmp_path: Path) -> None:
    error = refusal(tmp_path, scaled(), parameters(CPU_EXTENSION_PATH="/nowhere/lib.so"))
    assert error.message.startswith("openvino error in loading custom CPU extensions : ")
    assert "/nowhere/lib.so" in error.message


def test_a_value_that_openvino_refuses(tmp_path: Path) -> None:
    error = refusal(tmp_path, scaled(), parameters(SCHEDULING_CORE_TYPE="FAST"))
    assert error.message.startswith("openvino error in loading model : Wrong value FAST")


def test_a_parameter_of_others_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    config = {**declared("TYPE_FP32"), **parameters(EXECUTION_MODE="worker", owner="the vision team")}
    assert Opened(tmp_path, scaled(), config).answer(IN=np.zeros((1, 4), np.float32))
    assert caplog.text == ""


# ---- The framework ----


def test_openvino_is_imported_when_a_model_needs_it_and_tells_nobody() -> None:
    program = (
        "import sys; from nerite.backends.registry import backend; backend('openvino')\n"
        "assert 'openvino' not in sys.modules\n"
        "from nerite.frameworks.openvino.graph import openvino; openvino()\n"
        "from openvino.tools.ovc import telemetry_utils\n"
        "print(telemetry_utils.tm.__name__, 'openvino_telemetry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["openvino.tools.ovc.telemetry_stub", "False"]
