"""docs/audio.md: what it asks is answered, and its metrics are on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hearing_models import recording, speech_model, wav
from hub_stand_in import hub_stand_in
from pages import Page, rows, run
from serving import eventually, serving
from speaking_models import speaking_model
from tools import require

PAGE = Page("docs/audio.md")


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("curl")
    (tmp_path / "speech.wav").write_bytes(wav(recording(2)))
    models = tmp_path / "models"
    assert PAGE.block("serve") == "nerite serve models\n"
    with hub_stand_in() as hub:
        hub.publish("openai/whisper-base", speech_model(tmp_path / "files"))
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        run(PAGE.block("nerite add"), cwd=tmp_path)
    assert PAGE.block("optimum-cli").split()[-1] == "models/speaks/1"
    speaking_model(models / "speaks" / "1", "alice")
    plain, subtitles, streamed, spoken = [text for _, text in PAGE.blocks if text.startswith("curl")]
    with serving(models, tmp_path / "log") as server:
        text = json.loads(run(plain, server, tmp_path))["text"]
        assert text
        assert run(subtitles, server, tmp_path).startswith("1\n00:00:00,")
        events = [
            json.loads(line.removeprefix("data: ")) for line in run(streamed, server, tmp_path).split("\n\n") if line
        ]
        assert events[-1]["text"] == text
        assert "".join(event["delta"] for event in events[:-1]) == text
        run(spoken, server, tmp_path)
        assert (tmp_path / "morning.wav").read_bytes()[:4] == b"RIFF"
        names = [name.strip("`") for name in rows("docs/audio.md", "metric")]
        eventually(lambda: all(any(key.startswith(name) for key in server.metrics()) for name in names))
        assert len(names) == 3
