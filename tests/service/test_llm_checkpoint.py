"""Checkpoints of Hugging Face in a repository: converted on the first load, those of unknown families by the exporter.

The exporter's environment has 1.4 GB: what needs it is skipped where it is not installed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import openai
import pytest

import serving
from checkpoints import decoder_checkpoint, language_checkpoint
from llm_models import byte_tokenizer
from nerite.backends.python import environments
from nerite.llm import installation
from pages import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import speech_checkpoint  # the path has to be set first

PROMPT = "Once upon a time"
PLACE = environments.environments_folder()

pytestmark = pytest.mark.timeout(600)

exported = pytest.mark.skipif(
    installation.found(installation.EXPORTER, PLACE) is None,
    reason="the exporter is not installed: nerite engines install openvino-export",
)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PATIENCE", 500)


@pytest.fixture
def flag(tmp_path: Path) -> str:
    """The flag for a directory that has the exporter, and nothing that was made of checkpoints."""
    interpreter = installation.found(installation.EXPORTER, PLACE)
    assert interpreter is not None
    kept = tmp_path / "kept"
    kept.mkdir()
    for entry in PLACE.glob(f"{interpreter.parents[1].name}*"):
        (kept / entry.name).symlink_to(entry)
    return f"--environment-directory={kept}"


def tokens(server: serving.Serving, name: str, count: int = 12) -> list[int]:
    """Return the tokens with which a model goes on."""
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    said = {"text_input": PROMPT, "return_token_ids": True, "sampling_parameters": json.dumps(sampling)}
    status, _, body = server.ask("POST", f"/v2/models/{name}/generate", said)
    assert status == 200, body
    found: list[int] = json.loads(json.loads(body)["token_ids"])
    assert len(found) == count
    return found


def expected(directory: Path, count: int = 12) -> list[int]:
    """Return the tokens with which transformers goes on."""
    import torch  # here, for both take seconds
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = byte_tokenizer()(PROMPT, return_tensors="pt").input_ids
    before = found.shape[1]
    with torch.no_grad():
        for _ in range(count):
            found = torch.cat([found, model(found).logits[:, -1:].argmax(-1)], 1)
    return [int(token) for token in found[0, before:]]


def configure(model: Path) -> None:
    """Have a model compute as transformers does."""
    (model / "config.pbtxt").write_text(
        'backend: "llm"\n'
        'parameters { key: "WEIGHT_FORMAT" value { string_value: "fp32" } }\n'
        'parameters { key: "KV_CACHE_PRECISION" value { string_value: "f32" } }\n'
        'parameters { key: "INFERENCE_PRECISION_HINT" value { string_value: "f32" } }\n'
    )


def disguise(version: Path) -> Path:
    """Give a checkpoint a setting that is not known, and has no effect."""
    config = json.loads((version / "config.json").read_text())
    (version / "config.json").write_text(json.dumps({**config, "colour": "blue"}))
    return version


def test_known_families_need_no_environment(tmp_path: Path) -> None:
    """Twice the same content, under two names and without a configuration, in a repository that is only read."""
    models, kept = tmp_path / "models", tmp_path / "kept"
    for name in ("chat", "twin"):
        language_checkpoint(models / name / "1")
        os.chmod(models / name / "1", 0o555)
    decoder_checkpoint(models / "qwen" / "1", "qwen3", "bfloat16", shards=True)
    configure(models / "qwen")
    nowhere = {"UV_OFFLINE": "1", "UV_NO_CACHE": "1", "PIP_NO_INDEX": "1"}
    flag = f"--environment-directory={kept}"
    with serving.serving(models, tmp_path / "log", flag, environment=nowhere) as server:
        assert tokens(server, "chat") == tokens(server, "twin")
        assert tokens(server, "qwen") == expected(models / "qwen" / "1")
        assert server.text.count("converting '") == 2
        assert server.text.count("made a conversion from") == 2
        assert "made an environment" not in server.text
        assert "the engine is openvino_genai: there is no GPU" in server.text
        config = server.json("GET", "/v2/models/chat/config")
        assert (config["backend"], config["platform"]) == ("llm", "huggingface")
    assert len(environments.list_environments(kept)) == 2
    with serving.serving(models, tmp_path / "again", flag, environment=nowhere) as server:
        assert server.ready("chat")
        assert "converting '" not in server.text


@exported
def test_the_exporter_converts_the_others(tmp_path: Path, flag: str) -> None:
    models = tmp_path / "models"
    for name in ("own", "other"):
        language_checkpoint(models / name / "1")
        configure(models / name)
    disguise(models / "other" / "1")
    with serving.serving(models, tmp_path / "log", flag) as server:
        assert tokens(server, "own") == tokens(server, "other") == expected(models / "own" / "1")
        assert "'s exporter: config.json has 'colour', which is not known" in server.text


@exported
def test_what_the_exporter_says_is_in_the_error(tmp_path: Path, flag: str) -> None:
    models = tmp_path / "models"
    version = language_checkpoint(models / "chat" / "1")
    (version / "config.json").write_text('{"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}')
    with serving.serving(models, tmp_path / "log", "--exit-on-error=false", flag) as server:
        assert "nobody" in reason(server)
        assert f"the conversion of '{version}' cannot be made:" in reason(server)


@exported
def test_a_speech_model_is_converted(tmp_path: Path, flag: str) -> None:
    """A real Whisper but for its weights, with which the engine finds no words to time, though it looks for them."""
    models = tmp_path / "models"
    speech_checkpoint.write("mini", models / "ear" / "1")
    words = 'backend: "llm"\nparameters { key: "WORD_TIMESTAMPS" value { string_value: "true" } }\n'
    (models / "ear" / "config.pbtxt").write_text(words)
    recording = ("a.wav", speech_checkpoint.wav(speech_checkpoint.recording(3)))
    with (
        serving.serving(models, tmp_path / "log", flag) as server,
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client,
    ):
        answer = client.audio.transcriptions.create(
            model="ear",
            file=recording,
            language="en",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert answer.text
        assert answer.segments
        assert answer.words == []


def test_without_an_exporter_and_a_network(tmp_path: Path) -> None:
    disguise(language_checkpoint(tmp_path / "models" / "chat" / "1"))
    nowhere = {"UV_OFFLINE": "1", "UV_NO_CACHE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    flags = ("--exit-on-error=false", f"--environment-directory={tmp_path / 'kept'}")
    with serving.serving(tmp_path / "models", tmp_path / "log", *flags, environment=nowhere) as server:
        assert "openvino-export.txt' cannot be made:" in reason(server)
        assert "nerite engines install openvino-export" in reason(server)


def reason(server: serving.Serving) -> str:
    (entry,) = server.json("POST", "/v2/repository/index")
    return str(entry.get("reason", ""))
