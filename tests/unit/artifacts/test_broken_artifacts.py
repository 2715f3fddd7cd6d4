"""What cannot be served is refused with what it is, and with what to do."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import artifact_files as made
import numpy as np
import pytest

import tree_models
from foreign_models import paddle
from nerite.artifacts.artifact import Candidate, Unusable
from nerite.artifacts.recognition import recognise


def refusal(path: Path, **said: object) -> str:
    """Return the refusal, without the path that it begins with."""
    with pytest.raises(Unusable) as caught:
        recognise(Candidate(path, **said))  # type: ignore[arg-type]
    text, remedy = caught.value.message.split("\n    ", 1)
    assert len(remedy) > 10
    return f"{text.partition(': ')[2]} | {remedy}"


def half(path: Path) -> Path:
    os.truncate(path, path.stat().st_size * 2 // 3)
    return path


def without(path: Path, name: str) -> Path:
    path.with_name(name).unlink()
    return path


def cut(path: Path, name: str) -> Path:
    half(path.with_name(name))
    return path


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("net.onnx", b"", "the file is empty | Save the model again"),
        (
            "net.onnx",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "git lfs pull --include 'net.onnx'",
        ),
        ("net.onnx", b"<!DOCTYPE html><html>", "this is a web page, not a model | The link leads to a page"),
        ("net.onnx", b"\xff\xff not a model", "this is not an ONNX model"),
        ("net.pt", b"PK\x03\x04 and no more", "the file is truncated: the central directory"),
        ("net.plan", b"onnx", "this is not a TensorRT engine: it does not begin with ftrt | Build it again"),
        ("net.tflite", b"12345678", "this is not a LiteRT model"),
        ("net.tl", b"12345678" * 4, "this is not a treelite checkpoint"),
        ("net.safetensors", b"12345678" * 4, "this is not a safetensors file"),
        ("net.h5", b"\x89HDF\r\n\x1a\n" + bytes(10), "keras.models.load_model('net.h5').export('directory')"),
        ("net.cbm", b"CBM1" + bytes(10), "model.save_model('model.onnx', format='onnx')"),
        ("net.gguf", b"GGUF" + bytes(10), "the file is truncated"),
        ("net.json", b'[ { "nodeid": 0, "leaf": 1 } ]', "a human-readable dump of XGBoost's trees"),
        ("net.txt", b"booster[0]:\n0:leaf=0.1\n", "a human-readable dump of XGBoost's trees"),
        (
            "net.json",
            b'{"learner":{"generic_param":{"device":"cpu"}}}',
            "this is a booster's configuration (save_config)",
        ),
        ("net.txt", b"tree\nversion=v4\nTree=0\n", "the file is truncated: the line 'end of trees' is missing"),
        (
            "net.ubj",
            b"{L" + bytes(7) + b"\x07learner{",
            "the file is truncated: the closing brace at its end is missing",
        ),
        ("net.py", b"def f(:\n", "not valid Python, line 1"),
        ("net.py", b"class Model: pass\n", "the file has no class TritonPythonModel | Write a class"),
        ("net.py", b"class TritonPythonModel: pass\n", "the class TritonPythonModel has no method execute"),
        ("net.bin", b"\x00" * 100, "not a known kind of model | Known kinds: ONNX"),
        ("net.pkl", pickle.dumps(np.float64(1.5)), "this is a pickle of numpy"),
    ],
)
def test_files(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    assert says in refusal(written(tmp_path / name, content))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: half(made.onnx_model(folder / "a.onnx")), "the file is truncated: "),
        (lambda folder: half(made.safetensors_file(folder / "a.safetensors")), "the file is truncated: "),
        (lambda folder: without(made.openvino_model(folder / "a.xml"), "a.bin"), "its weights are missing: "),
        (
            lambda folder: cut(made.openvino_model(folder / "a.xml"), "a.bin"),
            " bytes of the weights of a.xml",
        ),
        (lambda folder: half(made.openvino_model(folder / "a.xml")), "the XML is invalid"),
        (lambda folder: half(made.tar(folder / "a.nemo", model_config_yaml="x" * 30000)), "the file is truncated"),
        (lambda folder: made.tar(folder / "a.nemo", model_config_yaml="x"), "model.export('model.onnx')"),
        (lambda folder: made.tar(folder / "a.tar", readme="x"), "this is an archive | Unpack it"),
    ],
)
def test_what_became_of_models(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    assert says in refusal(make(tmp_path))


def test_saved_models(tensorflow_artifacts: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tensorflow_artifacts / "scaled", tmp_path / "a")
    half(folder / "saved_model.pb")
    assert "the file is truncated" in refusal(folder)
    shutil.copyfile(tensorflow_artifacts / "scaled" / "saved_model.pb", folder / "saved_model.pb")
    next(folder.glob("variables/variables.data-*")).unlink()
    assert "this is a SavedModel with weights missing" in refusal(folder)
    assert "variables.data-?????-of-????? | Copy the whole directory" in refusal(folder)
    kept = shutil.move(folder / "variables", tmp_path / "kept")
    assert "this is a SavedModel with weights missing" in refusal(folder)
    shutil.move(kept, folder / "variables")
    (folder / "saved_model.pb").unlink()
    assert "without its graph: saved_model.pb is missing" in refusal(folder)


def test_forests(tmp_path: Path) -> None:
    tree_models.xgboost("reg:squarederror", "value").save(tmp_path / "a.ubj")
    tree_models.lightgbm("regression", "value").save(tmp_path / "a.txt")
    for name in ("a.ubj", "a.txt"):
        assert "the file is truncated" in refusal(half(half(tmp_path / name)))


def test_paddle(tmp_path: Path) -> None:
    path = written(tmp_path / "net.pdmodel", paddle(weights=True))
    assert "its weights are missing" in refusal(path)
    assert "the file is truncated" in refusal(half(path))
    assert "this is not a PaddlePaddle program" in refusal(written(path, b"\xff" * 40))


def test_torch_without_a_program(tmp_path: Path) -> None:
    made.torch_files(tmp_path)
    for name in ("weights.pt", "old.pt"):
        assert refusal(tmp_path / name).startswith("these are weights (a state_dict), without their module")
    assert "this is a pickled module (of the class torch.nn.modules.container.Sequential)" in refusal(
        tmp_path / "module.pt"
    )
    assert "the file is truncated" in refusal(half(tmp_path / "script.pt"))


def test_weights_of_onnx_that_are_missing(tmp_path: Path) -> None:
    path = made.onnx_model(tmp_path / "a.onnx", external=True)
    half(tmp_path / "weights.bin")
    assert "bytes of the weights of a.onnx are missing" in refusal(path)
    (tmp_path / "weights.bin").unlink()
    said = refusal(path)
    assert said == (
        f"the file with its weights is missing: weights.bin | Copy it to {tmp_path}/weights.bin: the exporter wrote it "
        "beside the model."
    )


def test_weights_without_their_class(tmp_path: Path) -> None:
    path = made.safetensors_file(tmp_path / "a.safetensors")
    assert "Specify its class: --class module.py:ClassName" in refusal(path)
    (tmp_path / "net.py").write_text("class Other: pass\n")
    assert "Classes in it: Other." in refusal(path, class_place=f"{tmp_path}/net.py:Net")
    assert "Write --class FILE.py:CLASS" in refusal(path, class_place="nowhere.py:Net")


def test_pickles_are_not_read_without_trust(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    trap = written(tmp_path / "trap.pkl", pickle.dumps(Trap()))
    assert "this is a pickle of posix.mkdir, which cannot be converted" in refusal(trap, trusted=True)
    from sklearn.linear_model import LinearRegression

    model = written(tmp_path / "model.pkl", pickle.dumps(LinearRegression()))
    said = refusal(model)
    assert "sklearn.linear_model._base.LinearRegression" in said
    assert "--trust" in said
    assert not (tmp_path / "sprung").exists()


def test_pickles_of_others_that_have_parts_of_scikit_learn(tmp_path: Path) -> None:
    from lightgbm import LGBMClassifier

    rows = np.arange(40, dtype=np.float64).reshape(20, 2)
    model = LGBMClassifier(n_estimators=2, min_child_samples=1, verbose=-1).fit(rows, rows[:, 0] > 9)
    said = refusal(written(tmp_path / "model.pkl", pickle.dumps(model)), trusted=True)
    assert said.startswith("this is a pickle of lightgbm.sklearn.LGBMClassifier | Save it in LightGBM's format")


def test_directories(tmp_path: Path) -> None:
    assert "the directory is empty" in refusal(tmp_path)
    assert "no such file or directory" in refusal(tmp_path / "absent")
    made.onnx_model(tmp_path / "a.onnx")
    made.onnx_model(tmp_path / "b.onnx")
    assert "the directory contains several models: a.onnx, b.onnx | Specify one of them." in refusal(tmp_path)


def test_a_whole_repository_and_a_model_without_versions(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "config.pbtxt").write_text("")
    assert f"add one of its models: nerite add {tmp_path}/some" in refusal(tmp_path)
    assert "the directory has a config.pbtxt but no version" in refusal(tmp_path / "some")


def test_hugging_face(tmp_path: Path) -> None:
    folder = made.hugging_face(tmp_path / "a", architectures=["ViTForImageClassification"], image_size=224)
    assert "the architecture ViTForImageClassification is not supported | Export it to ONNX: optimum-cli" in refusal(
        folder
    )
    folder = made.hugging_face(tmp_path / "b", auto_map={"AutoModel": "modeling.py"})
    assert "the model contains its own code" in refusal(folder)
    recognise(Candidate(folder, trusted=True))
    (folder / "tokenizer.json").unlink()
    assert "the tokenizer is missing" in refusal(folder, trusted=True)
    (folder / "model.safetensors").unlink()
    assert "the weights are missing" in refusal(folder)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    made.safetensors_file(folder / "model-1.safetensors")
    assert "a shard of the weights is missing: model-2.safetensors" in refusal(folder)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "model.merge_and_unload()" in refusal(tmp_path / "adapter")


def test_mlflow(tmp_path: Path) -> None:
    (tmp_path / "MLmodel").write_text("flavors:\n  python_function:\n    loader_module: x\n  prophet:\n    data: y\n")
    assert "it has: python_function, prophet | Log it in another flavour as well" in refusal(tmp_path)
    (tmp_path / "MLmodel").write_text("flavors:\n  onnx:\n    data: model.onnx\n")
    assert f"{tmp_path}/model.onnx, named in MLmodel, is missing" in refusal(tmp_path)
    assert "has no servable flavour 'sklearn'" in refusal(tmp_path, flavor="sklearn")
