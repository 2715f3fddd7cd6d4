"""Conversions of checkpoints: once for a content, and whole or not at all; by a program in the exporter's place."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import language_checkpoint
from nerite.backends.interface import ModelContext
from nerite.backends.python import environments
from nerite.core.errors import InvalidArgument, Unavailable
from nerite.llm import checkpoint, installation

EXPORTER = f"""#!{sys.executable}
import os, pathlib, sys, time
source, target = pathlib.Path(sys.argv[4]), pathlib.Path(sys.argv[5])
with (source.parent / "calls").open("a") as calls:
    print(*sys.argv[6:], os.environ["HF_HUB_OFFLINE"], file=calls)
print("exporting", flush=True)
while "held" in (source / "tokenizer.json").read_text() and not (source.parent / "go").exists():
    time.sleep(0.01)
if "broken" in (source / "tokenizer.json").read_text():
    sys.exit("this tokenizer is broken")
(target / "openvino_model.xml").touch()
if "strange" not in (source / "tokenizer.json").read_text():
    (target / "openvino_tokenizer.xml").touch()
"""


@pytest.fixture(autouse=True)
def _exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "optimum-cli"
    program.parent.mkdir()
    program.write_text(EXPORTER)
    program.chmod(0o755)
    monkeypatch.setattr(installation, "made", lambda wanted, place: program.with_name("python"))
    monkeypatch.setattr(environments, "stopped", threading.Event())


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., ModelContext]:
    def made(name: str = "m", tokenizer: str = "{}", **parameters: str) -> ModelContext:
        version = tmp_path / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (version / "model.safetensors").write_bytes(b"weights")
        (version / "tokenizer.json").write_text(tokenizer)
        config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
        settings = {environments.SETTING: str(tmp_path / "kept")}
        return ModelContext(name, 1, version.parent, config, settings)

    return made


def calls(tmp_path: Path, name: str = "m") -> list[str]:
    file = tmp_path / name / "calls"
    return file.read_text().splitlines() if file.is_file() else []


def test_once_for_its_content(model: Callable[..., ModelContext], tmp_path: Path) -> None:
    first = installation.converted(model())
    assert (first / "openvino_model.xml").is_file()
    assert calls(tmp_path) == ["--task text-generation-with-past --weight-format fp16 1"]
    # The same files, elsewhere and of another age.
    assert installation.converted(model("other")) == first
    os.utime(tmp_path / "m" / "1" / "model.safetensors", (1, 1))
    assert installation.converted(model()) == first
    assert installation.converted(model(WEIGHT_FORMAT="int8")) != first
    (tmp_path / "m" / "1" / "model.safetensors").write_bytes(b"other weights")
    context = model(tokenizer="{} ")
    assert installation.converted(context) not in (first, tmp_path / "m" / "1")
    assert len(calls(tmp_path)) == 3
    assert calls(tmp_path, "other") == []
    origins = {Path(kept.origin) for kept in environments.list_environments(tmp_path / "kept")}
    assert origins == {tmp_path / "m" / "1"}


def test_known_families_need_no_exporter(model: Callable[..., ModelContext], tmp_path: Path) -> None:
    contexts = [model(), model(WEIGHT_FORMAT="int8"), model(WEIGHT_FORMAT="int4")]
    directory = known(contexts[0])
    plain, small, smallest = map(installation.converted, contexts)
    assert {file.name for file in plain.iterdir()} == {
        *("config.json", "nerite-origin", "tokenizer.json", "tokenizer_config.json"),
        *(f"openvino_{part}.{end}" for part in ("detokenizer", "model", "tokenizer") for end in ("bin", "xml")),
    }
    assert installation.converted(contexts[0]) == plain
    sizes = [(made / "openvino_model.bin").stat().st_size for made in (plain, small, smallest)]
    assert sizes[1] < 0.7 * sizes[0]
    assert sizes[2] < 0.8 * sizes[1], "embeddings and the last layer are a third of it, and keep 8 bits"
    assert calls(tmp_path) == []
    (directory / "generation_config.json").write_text('{"temperature": 0.5}')
    assert installation.converted(contexts[0]) == plain


def test_what_is_not_known_is_left_to_the_exporter(
    model: Callable[..., ModelContext], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The conversion begins, and leaves nothing behind."""
    context = model()
    directory = known(context)
    (directory / "model.safetensors").write_bytes(b"\1")
    with caplog.at_level(logging.INFO):
        made = installation.converted(context)
    assert f"'{directory}' is converted by OpenVINO's exporter: 'model.safetensors' is not a safetensors" in caplog.text
    assert calls(tmp_path) == ["--task text-generation-with-past --weight-format fp16 1"]
    assert {file.name for file in made.iterdir()} == {"nerite-origin", "openvino_model.xml", "openvino_tokenizer.xml"}


def known(context: ModelContext) -> Path:
    """Put a checkpoint of a known family in the place of a model's."""
    shutil.rmtree(context.version_directory)
    return language_checkpoint(context.version_directory)


def test_settings_of_generation_are_no_part_of_it(model: Callable[..., ModelContext], tmp_path: Path) -> None:
    context = model()
    first = installation.converted(context)
    for temperature in (0.5, 0.7):
        settings = {"temperature": temperature, "eos_token_id": [2, 3]}
        (context.version_directory / "generation_config.json").write_text(json.dumps(settings))
        assert installation.converted(context) == first
    assert len(calls(tmp_path)) == 1
    assert checkpoint.end_tokens(context.version_directory) == {2, 3}


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 2}, {7}),
        ({"eos_token_id": [7, 8]}, {}, {7, 8}),
        ({"temperature": 1}, {"eos_token_id": 2}, {2}),
        ({"eos_token_id": "seven"}, {"eos_token_id": None}, None),
        ({"eos_token_id": [True, -1]}, {"eos_token_id": []}, None),
    ],
)
def test_the_tokens_that_end_an_answer(
    tmp_path: Path, generation: object, config: object, ends: set[int] | None
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint.end_tokens(tmp_path) == ends


def test_progress_is_reported(
    model: Callable[..., ModelContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter goes on when it was told of, and so takes long enough."""
    monkeypatch.setattr(environments, "PROGRESS_INTERVAL", 0.01)
    said: list[str] = []

    def hear(text: str) -> None:
        said.append(text)
        if text.endswith(": exporting"):
            (tmp_path / "m" / "go").touch()

    with environments.progress_reported(hear):
        installation.converted(model(tokenizer="held"))
    assert said[0] == f"making a conversion from '{tmp_path}/m/1'"
    assert re.fullmatch(rf"making the conversion of '{tmp_path}/m/1', \d+ s so far: exporting", said[-1])
    before = len(said)
    with environments.progress_reported(hear):
        installation.converted(model(tokenizer="held"))
    assert len(said) == before


@pytest.mark.parametrize(
    ("described", "task"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "text-generation-with-past"),
        ({"architectures": ["BertModel"]}, "feature-extraction"),
        ({"architectures": ["BertForSequenceClassification"]}, "text-classification"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}, "image-text-to-text"),
    ],
)
def test_for_what_the_model_does(
    model: Callable[..., ModelContext], tmp_path: Path, described: dict[str, object], task: str
) -> None:
    context = model()
    (context.version_directory / "config.json").write_text(json.dumps(described))
    installation.converted(context)
    assert calls(tmp_path) == [f"--task {task} --weight-format fp16 1"]


def test_a_repository_with_a_relative_path(
    model: Callable[..., ModelContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = installation.converted(replace(model(), directory=Path("m")))
    assert (made / "openvino_model.xml").is_file()


def test_several_at_once(model: Callable[..., ModelContext], tmp_path: Path) -> None:
    contexts = [model() for _ in range(4)]
    threads = [threading.Thread(target=installation.converted, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls(tmp_path)) == 1


def test_what_fails_says_why_and_leaves_nothing(model: Callable[..., ModelContext], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        installation.converted(model(tokenizer="broken"))
    assert refused.value.message == (
        f"the conversion of '{tmp_path}/m/1' cannot be made:\nexporting\nthis tokenizer is broken"
    )
    with pytest.raises(InvalidArgument, match="produced no tokenizer"):
        installation.converted(model(tokenizer="strange"))
    assert environments.list_environments(tmp_path / "kept") == []


def test_what_is_refused_before(model: Callable[..., ModelContext], tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"'WEIGHT_FORMAT' of model 'm' is 'int5'; it must be one of .* Did you mean int"
    ):
        installation.converted(model(WEIGHT_FORMAT="int5"))
    context = model()
    (tmp_path / "m" / "1" / "config.json").write_text("{}")
    with pytest.raises(Unavailable, match="does not say what the model does"):
        installation.converted(context)
    (tmp_path / "m" / "1" / "openvino_model.xml").touch()
    assert installation.converted(context) == tmp_path / "m" / "1"
    assert calls(tmp_path) == []
