"""Which files of a model on the hub are taken."""

from __future__ import annotations

import pytest

from nerite.core.errors import InvalidArgument, NotFound
from nerite.sources.hub_files import HubFile, HubRevision, check_revision, choose_files

SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def revision(*paths: str) -> HubRevision:
    files = tuple(HubFile(path, 10, f"{number:040x}") for number, path in enumerate(paths))
    return HubRevision("org/name", "c" * 40, files)


def taken(*paths: str, wanted: str = "", trusted: bool = False) -> set[str]:
    return {file.path for file in choose_files(revision(*paths), wanted, trusted=trusted).files}


def test_safetensors_and_nothing_else() -> None:
    more = ("README.md", ".gitattributes", "pytorch_model.bin", "tf_model.h5", "model.onnx", "a.gguf", "modeling.py")
    nested = ("onnx/model.onnx", "original/config.json", "1_Pooling/config.json", "images/a.txt")
    assert taken("model.safetensors", *SETTINGS, *more, *nested) == {
        "model.safetensors",
        *SETTINGS,
        "1_Pooling/config.json",
    }


def test_shards_and_not_the_same_weights_again() -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = "model.safetensors.index.json"
    assert taken(*shards, index, "consolidated.safetensors", "pytorch_model.bin.index.json") == {*shards, index}
    (remark,) = choose_files(revision(*shards, index, "consolidated.safetensors")).remarks
    assert "1 files with the weights in another form" in remark
    assert taken("model.safetensors", "model.fp16.safetensors") == {"model.safetensors"}


def test_openvino_comes_first_and_its_weights_are_no_pickles() -> None:
    own = [f"openvino_{name}.{kind}" for name in ("model", "tokenizer", "detokenizer") for kind in ("xml", "bin")]
    assert taken(*own, *SETTINGS, "model.safetensors", "pytorch_model.bin") == {*own, *SETTINGS}


def test_speech_and_images_of_openvino() -> None:
    hears = [
        f"openvino_{name}.{kind}" for name in ("encoder_model", "decoder_model", "vocoder") for kind in ("xml", "bin")
    ]
    assert taken(*hears, "config.json", "model.safetensors") == {*hears, "config.json"}
    paints = [f"{part}/openvino_{part}.{kind}" for part in ("model", "unet") for kind in ("xml", "bin")]
    more = ["model_index.json", "scheduler/scheduler_config.json", "unet/config.json"]
    assert taken(*paints, *more, "unet/model.safetensors", "sd.safetensors", "README.md") == {*paints, *more}
    with pytest.raises(InvalidArgument, match="diffusion pipeline for PyTorch, which has to be exported"):
        taken("model_index.json", "unet/model.safetensors", "sd.safetensors")


def test_one_of_several_gguf_files() -> None:
    assert taken("a-Q8_0.gguf", "config.json") == {"a-Q8_0.gguf"}
    several = ("a-Q8_0.gguf", "a-Q4_K_M.gguf", "a-F16.gguf")
    assert taken(*several) == {"a-Q4_K_M.gguf"}
    assert "of 2 others" in choose_files(revision(*several)).remarks[0]
    assert taken(*several, wanted="a-F16.gguf") == {"a-F16.gguf"}
    with pytest.raises(InvalidArgument, match=r"has 2 GGUF files. Name one:\n    hf:org/name/a-Q8_0.gguf  10 bytes"):
        taken("a-Q8_0.gguf", "a-F16.gguf")
    assert taken("a.gguf", "mmproj-a.gguf") == {"a.gguf"}


def test_onnx_with_its_weights() -> None:
    assert taken("model.onnx", "model.onnx_data", "other.onnx_data") == {"model.onnx", "model.onnx_data"}
    assert taken("onnx/model.onnx", "onnx/model.onnx.data", "config.json") == {
        "onnx/model.onnx",
        "onnx/model.onnx.data",
    }
    assert taken("net.onnx") == {"net.onnx"}
    with pytest.raises(InvalidArgument, match=r"has 2 ONNX files: a\.onnx, b\.onnx"):
        taken("a.onnx", "b.onnx")


def test_pickles_only_from_whom_is_trusted() -> None:
    files = ("pytorch_model.bin", "training_args.bin", "modeling.py", *SETTINGS)
    with pytest.raises(InvalidArgument, match=r"only as pickles \(pytorch_model.bin, training_args.bin\).*\n.*--trust"):
        taken(*files)
    assert taken(*files, trusted=True) == {"pytorch_model.bin", "modeling.py", *SETTINGS}
    with pytest.raises(InvalidArgument, match="only as pickles"):
        taken("model.safetensors", "x.pt", wanted="x.pt")
    assert taken("x.pt", wanted="x.pt", trusted=True) == {"x.pt"}


def test_programs_only_from_whom_is_trusted() -> None:
    assert "modeling.py" not in taken("model.safetensors", "modeling.py")
    assert "modeling.py" in taken("model.safetensors", "modeling.py", trusted=True)


def test_what_is_not_there() -> None:
    with pytest.raises(NotFound, match=r"has no file 'x.gguf'.\n    It has a.gguf"):
        taken("a.gguf", wanted="x.gguf")
    with pytest.raises(InvalidArgument, match="no weights in a form that can be served"):
        taken("README.md", "data.parquet")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a//b", "a\\b", "x\n", "", "config.json/x"])
def test_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(InvalidArgument, match="a file with a path that leads elsewhere"):
        check_revision(revision("config.json", path))


@pytest.mark.parametrize(
    "file",
    [HubFile("a", -1, "0" * 40), HubFile("a", 1, ""), HubFile("a", 1, "../../x"), HubFile("a", 1, "0" * 41)],
)
def test_files_without_size_or_hash(file: HubFile) -> None:
    with pytest.raises(InvalidArgument, match="without its size and hash"):
        check_revision(HubRevision("org/name", "c" * 40, (file,)))


def test_other_descriptions_that_are_not_plausible() -> None:
    with pytest.raises(InvalidArgument, match="without the hash of a commit"):
        check_revision(HubRevision("org/name", "main", ()))
    many = HubRevision("org/name", "c" * 40, tuple(HubFile(str(number), 1, "0" * 40) for number in range(10_001)))
    with pytest.raises(InvalidArgument, match="10001 files"):
        check_revision(many)
    fine = revision("config.json", "1_Pooling/config.json")
    assert check_revision(fine) is fine
