"""Which engine runs what, and what is said where none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.core.errors import InvalidArgument, Unavailable, Unsupported
from nerite.llm import checkpoint, selection
from nerite.llm.checkpoint import CheckpointContent
from nerite.llm.selection import OPENVINO, TENSORRT, VLLM, choose

ALL = {OPENVINO, VLLM, TENSORRT}


@pytest.mark.parametrize(
    ("content", "installed", "gpu", "engine", "why"),
    [
        (CheckpointContent.CHECKPOINT, ALL, True, VLLM, "there is a GPU"),
        (CheckpointContent.CHECKPOINT, ALL, False, OPENVINO, "there is no GPU"),
        (
            CheckpointContent.CHECKPOINT,
            {OPENVINO},
            True,
            OPENVINO,
            "there is a GPU, and vllm is not installed (nerite engines ",
        ),
        (CheckpointContent.CHECKPOINT, {TENSORRT}, True, TENSORRT, "there is a GPU, and vllm is not installed"),
        (
            CheckpointContent.CHECKPOINT,
            {VLLM},
            False,
            VLLM,
            "there is no GPU, and openvino_genai is not installed (pip install ",
        ),
        (CheckpointContent.OPENVINO, ALL, True, OPENVINO, "the model's files are OpenVINO's"),
        (CheckpointContent.ARGUMENTS, {OPENVINO}, False, VLLM, "the model has arguments for it"),
    ],
)
def test_the_best_that_is_installed(
    content: CheckpointContent, installed: set[str], gpu: bool, engine: str, why: str
) -> None:
    chosen = choose(content, "", installed, gpu=gpu)
    assert (chosen.engine, chosen.why[: len(why)]) == (engine, why)


def test_the_one_that_is_named() -> None:
    assert choose(CheckpointContent.CHECKPOINT, VLLM, {OPENVINO}, gpu=False).engine == VLLM
    with pytest.raises(InvalidArgument, match=r"'vlm' is not an engine\. Did you mean vllm\?"):
        choose(CheckpointContent.CHECKPOINT, "vlm", ALL, gpu=False)
    with pytest.raises(Unavailable, match="the engine vllm runs a Hugging Face checkpoint or arguments of vLLM"):
        choose(CheckpointContent.OPENVINO, VLLM, ALL, gpu=False)


def test_none_is_installed() -> None:
    with pytest.raises(Unsupported) as refused:
        choose(CheckpointContent.CHECKPOINT, "", (), gpu=False)
    assert refused.value.message == (
        "no engine for language models is installed. Install one with: pip install 'nerite[llm]', or nerite engines "
        "install vllm"
    )
    assert selection.remedy(TENSORRT) == "nerite engines install tensorrt-llm"


@pytest.mark.parametrize(
    ("files", "content"),
    [
        (("config.json", "model.safetensors"), CheckpointContent.CHECKPOINT),
        (
            ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
            CheckpointContent.CHECKPOINT,
        ),
        (("config.json", "model.safetensors", "openvino_model.xml"), CheckpointContent.OPENVINO),
        (("openvino_language_model.xml",), CheckpointContent.OPENVINO),
        (("model.json", "multi_lora.json"), CheckpointContent.ARGUMENTS),
        (("config.json", "pytorch_model.bin"), CheckpointContent.NOTHING),
        ((), CheckpointContent.NOTHING),
    ],
)
def test_what_a_directory_holds(files: tuple[str, ...], content: CheckpointContent, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).touch()
    assert checkpoint.checkpoint_content(tmp_path) is content
    assert checkpoint.checkpoint_content(tmp_path / "nowhere") is CheckpointContent.NOTHING


@pytest.mark.parametrize("task", ["embed", "rerank", "classify", "transcribe", "text_to_speech", "text_to_image"])
def test_models_that_read(task: str) -> None:
    every = frozenset(selection.ENGINES)
    assert choose(CheckpointContent.CHECKPOINT, "", every, gpu=True, task=task) == (
        "openvino_genai",
        f"no other engine has the task {task}",
    )
    assert choose(CheckpointContent.OPENVINO, "openvino_genai", every, gpu=False, task=task).engine == "openvino_genai"
    with pytest.raises(Unsupported, match=f"the engine vllm only generates text, but the task of the model is {task}"):
        choose(CheckpointContent.CHECKPOINT, "vllm", every, gpu=True, task=task)
