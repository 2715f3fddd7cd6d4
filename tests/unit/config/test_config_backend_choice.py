from __future__ import annotations

import pytest

from nerite.config.defaults import choose_backend
from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument


def chosen(config: ModelConfig, files: dict[str, bool] | None, name: str = "m") -> tuple[str, str, str]:
    config = choose_backend(config, name, files)
    return config.backend, config.platform, config.default_model_filename


@pytest.mark.parametrize(
    ("file", "directory", "wanted"),
    [
        ("model.savedmodel", True, ("tensorflow", "tensorflow_savedmodel", "model.savedmodel")),
        ("model.graphdef", False, ("tensorflow", "tensorflow_graphdef", "model.graphdef")),
        ("model.plan", False, ("tensorrt", "tensorrt_plan", "model.plan")),
        ("model.tflite", False, ("litert", "", "model.tflite")),
        ("model.onnx", False, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ("model.onnx", True, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ("model.xml", False, ("openvino", "", "model.xml")),
        ("model.pt", False, ("pytorch", "pytorch_libtorch", "model.pt")),
        ("model.pt2", False, ("pytorch", "torch_aoti", "model.pt2")),
        ("model.py", False, ("python", "", "model.py")),
        ("model.pdmodel", False, ("openvino", "", "model.pdmodel")),
    ],
)
def test_a_file_tells_the_backend(file: str, directory: bool, wanted: tuple[str, str, str]) -> None:
    assert chosen(ModelConfig(), {"notes.txt": False, file: directory}) == wanted
    if not file.endswith(("savedmodel", "graphdef", ".pt2", "pdmodel")):
        assert chosen(ModelConfig(backend=wanted[0]), None) == wanted
    if wanted[1]:
        assert chosen(ModelConfig(platform=wanted[1]), None) == wanted
    assert chosen(ModelConfig(default_model_filename=file), None) == wanted


@pytest.mark.parametrize(("file", "directory"), [("model.savedmodel", False), ("model.plan", True), ("model.pt", True)])
def test_a_directory_is_not_a_file(file: str, directory: bool) -> None:
    with pytest.raises(InvalidArgument):
        choose_backend(ModelConfig(), "m", {file: directory})


def test_a_framework_comes_before_python() -> None:
    assert chosen(ModelConfig(), {"model.py": False, "model.onnx": False})[0] == "onnxruntime"


def test_the_two_formats_of_tensorflow_are_told_apart_by_the_file() -> None:
    config = ModelConfig(backend="tensorflow")
    assert chosen(config, {"model.graphdef": False})[1] == "tensorflow_graphdef"
    assert chosen(config, {"model.savedmodel": True})[1] == "tensorflow_savedmodel"
    assert chosen(config, {})[1] == ""


@pytest.mark.parametrize("file", ["xgboost.ubj", "xgboost.json", "xgboost.model", "model.txt", "checkpoint.tl"])
def test_a_file_of_trees_tells_the_backend_and_the_backend_no_file(file: str) -> None:
    assert chosen(ModelConfig(), {file: False}) == ("fil", "", file)
    assert chosen(ModelConfig(default_model_filename=file), None) == ("fil", "", file)
    # Parameters have a say in which of them it is.
    assert chosen(ModelConfig(backend="fil"), {file: False}) == ("fil", "", "")


@pytest.mark.parametrize(
    ("backend", "files", "wanted"),
    [
        ("openvino", {"model.onnx": False}, ("openvino", "", "model.onnx")),
        ("openvino", {"model.onnx": False, "model.xml": False}, ("openvino", "", "model.xml")),
        ("openvino", {"model.savedmodel": True}, ("openvino", "", "model.savedmodel")),
        ("openvino", {}, ("openvino", "", "model.xml")),
        ("pytorch", {"model.pt2": False}, ("pytorch", "torch_aoti", "model.pt2")),
        ("pytorch", {}, ("pytorch", "pytorch_libtorch", "model.pt")),
    ],
)
def test_the_formats_of_a_named_backend_are_told_apart_by_the_file(
    backend: str, files: dict[str, bool], wanted: tuple[str, str, str]
) -> None:
    assert chosen(ModelConfig(backend=backend), files) == wanted


def test_what_is_given_stays() -> None:
    config = ModelConfig(backend="python", platform="own", default_model_filename="other.py")
    assert chosen(config, {"model.onnx": False}) == ("python", "own", "other.py")


def test_the_name_of_the_model_tells_a_backend_of_its_own() -> None:
    assert chosen(ModelConfig(), {}, "x.identity") == ("identity", "", "model.identity")
    assert chosen(ModelConfig(), None, "x.y.z") == ("y.z", "", "model.y.z")


@pytest.mark.parametrize("backend", ["tflite", "armnn_tflite"])
def test_backends_that_others_made_for_triton(backend: str) -> None:
    wanted = ("litert", "", "model.tflite")
    assert chosen(ModelConfig(backend=backend), {"model.tflite": False}) == wanted
    assert chosen(ModelConfig(), None, f"x.{backend}")[0] == "litert"


def test_nothing_tells_the_backend() -> None:
    with pytest.raises(InvalidArgument) as refused:
        choose_backend(ModelConfig(), "m", {"weights.bin": False})
    assert refused.value.message == (
        "Invalid model name: Could not determine backend for model 'm' with no backend in model configuration. "
        "Expected model name of the form 'model.<backend_name>'."
    )
