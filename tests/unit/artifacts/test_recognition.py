"""What a file or a directory is, seen from its content, and what is said of files that are plainly damaged."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import artifact_files as made
import joblib
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import tree_models
from foreign_models import paddle
from nerite.artifacts.artifact import Artifact, Candidate, Unusable
from nerite.artifacts.recognition import damage_explained, recognise
from nerite.config.model_config import ModelConfig
from nerite.core.errors import Internal, NeriteError, Unavailable


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    made.torch_files(folder)
    return folder


def what(path: Path, **said: object) -> tuple[str, str, list[str]]:
    """Return kind, backend and files."""
    found = artifact(path, **said)
    return found.kind, found.config.backend, sorted(found.files)


def artifact(path: Path, **said: object) -> Artifact:
    return recognise(Candidate(path, **said))  # type: ignore[arg-type]


def test_paddle(tmp_path: Path) -> None:
    (tmp_path / "net.pdmodel").write_bytes(paddle())
    assert what(tmp_path / "net.pdmodel") == ("PaddlePaddle model", "openvino", ["model.pdmodel"])
    (tmp_path / "net.pdmodel").write_bytes(paddle(weights=True))
    (tmp_path / "net.pdiparams").write_bytes(bytes(16))
    for path in (tmp_path / "net.pdmodel", tmp_path / "net.pdiparams", tmp_path):
        assert what(path)[2] == ["model.pdiparams", "model.pdmodel"]


@pytest.mark.parametrize("name", ["net.onnx", "net", "net.model"])
def test_onnx_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    made.onnx_model(tmp_path / name)
    assert what(tmp_path / name) == ("ONNX model", "onnxruntime", ["model.onnx"])


def test_onnx_with_weights_beside_it(tmp_path: Path) -> None:
    made.onnx_model(tmp_path / "net.onnx", external=True)
    assert what(tmp_path / "net.onnx") == ("ONNX model", "onnxruntime", ["model.onnx", "weights.bin"])
    assert what(tmp_path) == ("ONNX model", "onnxruntime", ["model.onnx", "weights.bin"])


@pytest.mark.parametrize(
    ("name", "kind", "file"),
    [("script.pt", "TorchScript program", "model.pt"), ("exported.pt2", "exported PyTorch program", "model.pt2")],
)
def test_programs_of_torch(torch_folder: Path, tmp_path: Path, name: str, kind: str, file: str) -> None:
    assert what(torch_folder / name) == (kind, "pytorch", [file])
    misnamed = tmp_path / "thing.bin"
    misnamed.write_bytes((torch_folder / name).read_bytes())
    assert what(misnamed) == (kind, "pytorch", [file])


def test_weights_with_their_class(tmp_path: Path) -> None:
    made.safetensors_file(tmp_path / "weights.safetensors")
    (tmp_path / "net.py").write_text("class Net:\n    pass\n")
    kind, backend, files = what(tmp_path / "weights.safetensors", class_place=f"{tmp_path}/net.py:Net")
    assert (kind, backend) == ("PyTorch module with its weights", "pytorch")
    assert files == ["model.py", "model.safetensors"]


def test_openvino(tmp_path: Path) -> None:
    made.openvino_model(tmp_path / "net.xml")
    for name in ("net.xml", "net.bin", ""):
        assert what(tmp_path / name) == ("OpenVINO model", "openvino", ["model.bin", "model.xml"])


@pytest.mark.parametrize(
    ("name", "kind", "backend", "file"),
    [
        ("scaled", "TensorFlow SavedModel", "tensorflow", "model.savedmodel"),
        ("scaled/saved_model.pb", "TensorFlow SavedModel", "tensorflow", "model.savedmodel"),
        ("frozen.pb", "TensorFlow graph", "tensorflow", "model.graphdef"),
        ("scaled.tflite", "LiteRT model", "litert", "model.tflite"),
    ],
)
def test_tensorflow(tensorflow_artifacts: Path, name: str, kind: str, backend: str, file: str) -> None:
    assert what(tensorflow_artifacts / name) == (kind, backend, [file])


def test_forests(tmp_path: Path) -> None:
    boosted = tree_models.xgboost("binary:logistic", "two")
    boosted.save(tmp_path / "a.ubj")
    boosted.model.save_model(tmp_path / "b.json")
    tree_models.lightgbm("multiclass", "three").save(tmp_path / "c")
    tree_models.sklearn("IsolationForest").save(tmp_path / "d")
    (tmp_path / "e").write_bytes(tree_models.legacy_binary())
    (tmp_path / "f").write_bytes(b"binf" + tree_models.legacy_binary())
    (tmp_path / "a").write_bytes((tmp_path / "a.ubj").read_bytes())
    found = {}
    for name in ("a", "a.ubj", "b.json", "c", "d", "e", "f"):
        forest = artifact(tmp_path / name)
        assert forest.config.backend == "fil"
        found[name] = (*forest.files, forest.config.parameters["model_type"].string_value)
    assert found == {
        "a": ("xgboost.ubj", "xgboost_ubj"),
        "a.ubj": ("xgboost.ubj", "xgboost_ubj"),
        "b.json": ("xgboost.json", "xgboost_json"),
        "c": ("model.txt", "lightgbm"),
        "d": ("checkpoint.tl", "treelite_checkpoint"),
        "e": ("xgboost.model", "xgboost"),
        "f": ("xgboost.model", "xgboost"),
    }


@pytest.mark.parametrize("write", [pickle.dump, joblib.dump])
@pytest.mark.parametrize("compress", [0, 3, ("gzip", 3), ("xz", 3)])
def test_scikit_learn(tmp_path: Path, write: object, compress: object) -> None:
    model = LogisticRegression().fit(np.eye(4), [0, 1, 0, 1])
    path = tmp_path / "model.pkl"
    if write is pickle.dump:
        path.write_bytes(pickle.dumps(model))
    else:
        joblib.dump(model, path, compress=compress)
    found = artifact(path, trusted=True)
    assert (found.kind, found.config.backend) == ("scikit-learn model (LogisticRegression)", "onnxruntime")


def test_python(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a b")
    (tmp_path / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    )
    assert what(tmp_path / "model.py") == ("Python model", "python", ["model.py"])
    assert what(tmp_path) == ("Python model", "python", ["model.py", "words.txt"])


def test_a_directory_of_a_repository(tmp_path: Path) -> None:
    for version in ("1", "3"):
        (tmp_path / version).mkdir()
    (tmp_path / "labels.txt").write_text("a\n")
    found = artifact(tmp_path)
    assert (found.kind, sorted(found.versions), list(found.beside)) == ("model directory", [1, 3], ["labels.txt"])
    assert not found.finished
    (tmp_path / "config.pbtxt").write_text('backend: "python"')
    assert artifact(tmp_path).finished


def test_hugging_face(tmp_path: Path) -> None:
    folder = made.hugging_face(tmp_path / "sentiment", id2label={"1": "good", "0": "bad"})
    found = artifact(folder)
    assert found.kind == "Hugging Face model (BertForSequenceClassification)"
    assert found.config.output[0].dims == (2,)
    assert sorted(found.files) == [
        "model.py",
        "pretrained.py",
        *(f"weights/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")),
    ]
    assert found.make is not None
    (tmp_path / "staged" / "1").mkdir(parents=True)
    found.make(tmp_path / "staged" / "1")
    assert (tmp_path / "staged" / "labels.txt").read_text() == "bad\ngood\n"


@pytest.mark.parametrize(
    ("architecture", "output"),
    [("BertModel", "embedding"), ("LlamaForCausalLM", "generated"), ("T5ForConditionalGeneration", "generated")],
)
def test_tasks_of_hugging_face(tmp_path: Path, architecture: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    folder = made.hugging_face(tmp_path / "it", architectures=[architecture], hidden_size=8)
    assert artifact(folder).config.output[0].name == output


def test_language_models_are_for_an_engine(tmp_path: Path) -> None:
    """Where there is one; what it cannot run is left to the program."""
    found = artifact(made.hugging_face(tmp_path / "it", architectures=["LlamaForCausalLM"]))
    assert found.config == ModelConfig(backend="llm")
    assert sorted(found.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    other = made.hugging_face(tmp_path / "other", architectures=["T5ForConditionalGeneration"])
    assert artifact(other).config.backend == "python"


def test_what_reads_texts_is_for_an_engine_if_it_says_what_for(tmp_path: Path) -> None:
    sentences = made.hugging_face(tmp_path / "sentences", architectures=["BertModel"], hidden_size=8)
    assert artifact(sentences).config.backend == "python"
    (sentences / "modules.json").write_text("[]")
    (sentences / "1_Pooling").mkdir()
    found = artifact(sentences)
    assert found.config == ModelConfig(backend="llm")
    assert {"modules.json", "1_Pooling"} <= set(found.files)
    assert artifact(made.hugging_face(tmp_path / "rates", id2label={"0": "LABEL_0"})).config == ModelConfig(
        backend="llm"
    )


def test_language_models_of_openvino(tmp_path: Path) -> None:
    own = [f"openvino_{name}.{kind}" for name in ("model", "tokenizer", "detokenizer") for kind in ("xml", "bin")]
    for name in (*own, "config.json", "pytorch_model.bin", "model.safetensors", "README.md"):
        (tmp_path / name).write_text('{"model_type": "llama"}')
    found = artifact(tmp_path)
    assert (found.kind, found.config) == ("language model for OpenVINO", ModelConfig(backend="llm"))
    assert sorted(found.files) == sorted([*own, "config.json"])
    (tmp_path / "openvino_model.bin").unlink()
    with pytest.raises(Unusable, match=r"the weights are missing: openvino_model\.bin"):
        artifact(tmp_path)


TO_TEXT = ("encoder_model", "decoder_model", "tokenizer", "detokenizer")
TO_SPEECH = ("encoder_model", "decoder_model", "postnet", "vocoder", "tokenizer")


@pytest.mark.parametrize(
    ("graphs", "more", "kind", "task"),
    [
        (TO_TEXT, ["preprocessor_config.json"], "speech-to-text model for OpenVINO", "transcribe"),
        (TO_SPEECH, ["voices"], "text-to-speech model for OpenVINO", "text_to_speech"),
    ],
)
def test_speech_of_openvino(tmp_path: Path, graphs: tuple[str, ...], more: list[str], kind: str, task: str) -> None:
    own = [f"openvino_{name}.{suffix}" for name in graphs for suffix in ("xml", "bin")]
    for name in (*own, "config.json", "generation_config.json", "preprocessor_config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "voices").mkdir()
    found = artifact(tmp_path)
    assert (found.kind, found.task, found.config) == (kind, task, ModelConfig(backend="llm"))
    assert {*own, "config.json", *more} <= set(found.files)
    assert "model.safetensors" not in found.files
    (tmp_path / "openvino_decoder_model.bin").unlink()
    with pytest.raises(Unusable, match=r"the weights are missing: openvino_decoder_model\.bin"):
        artifact(tmp_path)
    (tmp_path / "openvino_decoder_model.xml").unlink()
    with pytest.raises(Unusable, match=r"the network openvino_decoder_model\.xml is missing"):
        artifact(tmp_path)


def test_images_of_openvino(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "model.safetensors").write_text("")
    with pytest.raises(Unusable, match="diffusion pipeline for PyTorch") as caught:
        artifact(tmp_path)
    assert "optimum-cli export openvino" in caught.value.message
    for part in ("unet", "vae_decoder"):
        (tmp_path / part).mkdir(exist_ok=True)
        (tmp_path / part / "openvino_model.xml").write_text("")
        with pytest.raises(Unusable, match=r"openvino_model\.bin|vae_decoder"):
            artifact(tmp_path)
        (tmp_path / part / "openvino_model.bin").write_text("")
    found = artifact(tmp_path)
    assert (found.kind, found.task) == ("image generation pipeline for OpenVINO", "text_to_image")
    assert sorted(found.files) == ["model_index.json", "unet", "vae_decoder"]


def test_checkpoints_of_speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whisper = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 80}
    folder = made.hugging_face(tmp_path / "whisper", **whisper)
    (folder / "preprocessor_config.json").write_text("{}")
    found = artifact(folder)
    assert (found.task, found.config.backend) == ("transcribe", "llm")
    assert {"config.json", "model.safetensors", "preprocessor_config.json"} <= set(found.files)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(Unusable, match="safetensors"):
        artifact(folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unusable, match=r"pip install 'nerite\[llm\]'"):
        artifact(folder)
    speaks = {"model_type": "speecht5", "architectures": ["SpeechT5ForTextToSpeech"]}
    with pytest.raises(Unusable, match="has no vocoder"):
        artifact(made.hugging_face(tmp_path / "speaks", **speaks))


def test_engines_of_tensorrt(tmp_path: Path) -> None:
    (tmp_path / "net.plan").write_bytes(b"ftrt" + bytes(60))
    assert what(tmp_path / "net.plan") == ("TensorRT engine", "tensorrt", ["model.plan"])
    folder = tmp_path / "llm"
    folder.mkdir()
    (folder / "rank0.engine").write_bytes(b"x")
    (folder / "config.json").write_text("{}")
    assert what(folder) == ("TensorRT-LLM engine", "tensorrtllm", ["config.json", "rank0.engine"])


def logged(folder: Path, *flavors: str) -> Path:
    folder.mkdir()
    lines = [f"  {flavor}:\n    data: model.onnx\n    providers:\n    - CPUExecutionProvider" for flavor in flavors]
    (folder / "MLmodel").write_text("\n".join(["artifact_path: m", "flavors:", *lines, "run_id: abc", ""]))
    made.onnx_model(folder / "model.onnx")
    return folder


def test_mlflow(tmp_path: Path) -> None:
    folder = logged(tmp_path / "logged", "python_function", "onnx")
    found = artifact(folder)
    assert (found.kind, found.name, list(found.files)) == ("ONNX model, logged by MLflow", "logged", ["model.onnx"])
    (folder / "config.pbtxt").write_text("max_batch_size: 4\n")
    found = artifact(folder, flavor="onnx")
    assert found.finished
    assert list(found.beside) == ["config.pbtxt"]


@pytest.mark.parametrize(
    ("path", "name"),
    [("resnet50.onnx", "resnet50"), ("resnet50/model.onnx", "resnet50"), ("resnet50/3/model.onnx", "resnet50")],
)
def test_names(tmp_path: Path, path: str, name: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    made.onnx_model(tmp_path / path)
    assert artifact(tmp_path / path).name == name


def test_recognition_imports_no_framework() -> None:
    import subprocess
    import sys

    program = "import sys, nerite.artifacts.recognition; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"onnx", "onnxruntime", "torch", "sklearn", "joblib", "mlflow", "transformers"} & set(
        done.stdout.split()
    )


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456\n"


def refusal(folder: Path, filename: str, error: NeriteError | None = None) -> str:
    """Return the refusal of a version whose backend says ``error``."""
    with pytest.raises(NeriteError) as raised, damage_explained(folder, filename):
        if error is not None:
            raise error
    assert isinstance(raised.value, type(error) if error is not None else Internal)
    return raised.value.message


@pytest.mark.parametrize(
    ("filename", "file"),
    [
        ("model.py", "model.py"),
        ("model.onnx", "model.onnx"),
        ("model.xml", "model.bin"),
        ("model.onnx", "model.onnx.data"),
        ("model.savedmodel", "model.savedmodel/saved_model.pb"),
        ("model.savedmodel", "model.savedmodel/variables/variables.index"),
    ],
)
def test_a_pointer_of_git_lfs_is_not_opened(tmp_path: Path, filename: str, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(POINTER)
    assert refusal(tmp_path, filename) == (
        f"'{path}' is a Git LFS pointer, not the file itself. Fetch the file, in its Git repository: git lfs "
        f"pull --include '{path.name}'"
    )


@pytest.mark.parametrize(("filename", "file"), [("model.py", "model.pt"), ("model.onnx", "weights.bin"), ("", "x.ubj")])
def test_a_pointer_that_may_not_matter_is_told_where_something_fails(tmp_path: Path, filename: str, file: str) -> None:
    (tmp_path / (filename or file)).touch()
    (tmp_path / file).write_bytes(POINTER)
    with damage_explained(tmp_path, filename):
        pass
    told = refusal(tmp_path, filename, Internal("it fails"))
    assert told.startswith(f"it fails. '{tmp_path / file}' is a Git LFS pointer, not the file")


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", "the file is empty. Save the model again, or copy the file again."),
        (b"<!DOCTYPE html><html>", "this is a web page, not a model. The link leads to a page about the file, or"),
        (b"\x08\x08\x3a\xff\x01abc", "the file is truncated: 252 bytes are missing. Copy or download it again and"),
    ],
)
def test_a_refusal_goes_on_with_what_is_wrong(tmp_path: Path, content: bytes, note: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert refusal(tmp_path, path.name, Internal("it fails")).startswith(f"it fails. {path}: {note}")


def test_a_model_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "resnet.onnx").touch()
    (tmp_path / "notes.txt").touch()
    assert refusal(tmp_path, "model.onnx", Unavailable("it is not there")) == (
        "it is not there. Found 'resnet.onnx' instead: rename it to model.onnx, or set default_model_filename: "
        '"resnet.onnx"'
    )
    assert refusal(tmp_path, "model.pt", Unavailable("it is not there")) == "it is not there"
    assert refusal(tmp_path / "nowhere", "model.pt", Unavailable("it is not there")) == "it is not there"


def test_a_refusal_of_files_that_are_right_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1\n")
    assert refusal(tmp_path, "model.py", Internal("it fails")) == "it fails"
