"""What a model is for: by its parameter, and by what lies beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import InvalidArgument, Unavailable
from nerite.llm import backend, checkpoint, installation
from nerite.llm.openvino_genai import options


def context(directory: Path, config: dict[str, Any] | None = None, **parameters: str) -> ModelContext:
    given = {key: {"string_value": value} for key, value in parameters.items()}
    return ModelContext("m", 1, directory, {"backend": "llm", "parameters": given, **(config or {})})


@pytest.mark.parametrize(
    ("described", "task"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "generate"),
        ({"architectures": ["GPT2LMHeadModel"]}, "generate"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "generate"),
        ({"architectures": ["BertModel"]}, "embed"),
        ({"architectures": ["XLMRobertaForSequenceClassification"]}, "rerank"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, "rerank"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"1": "b", "0": "a"}}, "classify"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"x": "b", "y": "a"}}, "rerank"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "transcribe"),
        ({"architectures": ["SpeechT5ForTextToSpeech"]}, "text_to_speech"),
        ({"architectures": "BertModel"}, "generate"),
        ([], "generate"),
    ],
)
def test_by_the_checkpoint(tmp_path: Path, described: Any, task: str) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps(described))
    assert checkpoint.task_of(context(tmp_path)) == task
    assert checkpoint.task_of(context(tmp_path, TASK="rerank")) == "rerank"
    (tmp_path / "1" / "modules.json").write_text("[]")
    assert checkpoint.task_of(context(tmp_path)) == "embed"


def test_by_the_list_of_parts(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model_index.json").write_text("{}")
    assert checkpoint.task_of(context(tmp_path)) == "text_to_image"
    with pytest.raises(Unavailable, match=r"has no vae_decoder/openvino_model.xml"):
        options.check_files(context(tmp_path), "text_to_image")


def test_a_checkpoint_without_its_vocoder(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text('{"architectures": ["SpeechT5ForTextToSpeech"]}')
    (tmp_path / "1" / "model.safetensors").write_text("")
    with pytest.raises(Unavailable, match="optimum-cli export openvino --task text-to-audio"):
        installation.converted(context(tmp_path))


def test_by_nothing(tmp_path: Path) -> None:
    assert checkpoint.task_of(context(tmp_path)) == "generate"
    with pytest.raises(InvalidArgument, match=r"parameter 'TASK' of model 'm' is 'embedd'. Did you mean embed\?"):
        checkpoint.task_of(context(tmp_path, TASK="embedd"))


def test_configurations(tmp_path: Path) -> None:
    embeds = backend.completed_config(context(tmp_path, {"max_batch_size": 8}), "embed")
    assert (embeds["max_batch_size"], embeds["dynamic_batching"]) == (8, {})
    assert "dynamic_batching" not in backend.completed_config(context(tmp_path, {"max_batch_size": 1}), "embed")
    with pytest.raises(InvalidArgument, match="takes several texts in each request"):
        backend.completed_config(context(tmp_path, {"max_batch_size": 8}), "rerank")
    with pytest.raises(InvalidArgument, match="which no model of its kind has: available are query, documents"):
        backend.completed_config(
            context(tmp_path, {"input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}]}), "rerank"
        )


def test_options(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unavailable, match=r"has no openvino_model.xml, openvino_tokenizer.xml\. "):
        options.check_files(context(tmp_path), "embed")
    (tmp_path / "1").mkdir()
    for file in ("openvino_model.xml", "openvino_tokenizer.xml"):
        (tmp_path / "1" / file).write_text("")
    instance = InstanceContext("m_0")
    assert options.read_encoder(context(tmp_path), instance, "embed").pooling == "CLS"
    assert "does not specify its pooling" in caplog.text
    last = options.read_encoder(context(tmp_path, POOLING_TYPE="last", NORMALIZE="false"), instance, "embed")
    assert (last.pooling, last.normalize) == ("LAST_TOKEN", False)
    with pytest.raises(InvalidArgument, match=r"parameter 'POOLING_TYPE' of model 'm' is 'MAX'. There are: CLS"):
        options.read_encoder(context(tmp_path, POOLING_TYPE="max"), instance, "embed")
    with pytest.raises(InvalidArgument, match="Did you mean POOLING_TYPE"):
        options.read_encoder(context(tmp_path, POOLING_TYP="MEAN"), instance, "embed")
