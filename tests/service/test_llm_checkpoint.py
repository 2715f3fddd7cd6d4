"""Checkpoints of Hugging Face in a repository: converted on the first load, by the real exporter where that is there.

Its environment has 1.4 GB. What needs no exporter is in tests/unit/llm/test_llm_conversion.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import openai
import pytest

import serving
from checkpoints import language_checkpoint
from nerite.backends.python import environments
from nerite.llm import installation
from pages import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import speech_checkpoint  # the path has to be set first

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


@exported
def test_converted_once_and_served(tmp_path: Path, flag: str) -> None:
    """Twice the same content, under two names and without a configuration, in a repository that is only read."""
    models = tmp_path / "models"
    for name in ("chat", "twin"):
        language_checkpoint(models / name / "1")
        os.chmod(models / name / "1", 0o555)
    with serving.serving(models, tmp_path / "log", flag) as server:
        answers = set()
        for name in ("chat", "twin"):
            said = {"text_input": "once", "parameters": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}
            status, _, body = server.ask("POST", f"/v2/models/{name}/generate", said)
            assert status == 200, body
            answers.add(json.loads(body)["text_output"])
        assert len(answers) == 1
        assert server.text.count("converting '") == 1
        assert server.text.count("made a conversion from") == 1
        assert "the engine is openvino_genai: there is no GPU" in server.text
        config = server.json("GET", "/v2/models/chat/config")
        assert (config["backend"], config["platform"]) == ("llm", "huggingface")
    with serving.serving(models, tmp_path / "again", flag) as server:
        assert server.ready("chat")
        assert "converting '" not in server.text


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
    language_checkpoint(tmp_path / "models" / "chat" / "1")
    nowhere = {"UV_OFFLINE": "1", "UV_NO_CACHE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    flags = ("--exit-on-error=false", f"--environment-directory={tmp_path / 'kept'}")
    with serving.serving(tmp_path / "models", tmp_path / "log", *flags, environment=nowhere) as server:
        assert "openvino-export.txt' cannot be made:" in reason(server)
        assert "nerite engines install openvino-export" in reason(server)


def reason(server: serving.Serving) -> str:
    (entry,) = server.json("POST", "/v2/repository/index")
    return str(entry.get("reason", ""))
