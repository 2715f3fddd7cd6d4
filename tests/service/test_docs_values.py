"""The values in /v2/docs: they are edited, and the commands that follow them work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, browsing
from serving import IDENTITY, IN_PROCESS, NERITE, Serving, pbtxt, python_model, serving
from tools import require

STREAM = """
def execute(self, requests):
    for request in requests:
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor.as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
TEXT = 'it\'s "quoted", $HOME & ünïcode'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("values")
    models = folder / "models"
    python_model(models, "numbers", IDENTITY, pbtxt(dims="2", parameters=IN_PROCESS))
    python_model(models, "words", IDENTITY, pbtxt(0, "", "TYPE_STRING", "1", IN_PROCESS))
    python_model(models, "flags", IDENTITY, pbtxt(0, "", "TYPE_BOOL", "-1", IN_PROCESS))
    python_model(models, "large", IDENTITY, pbtxt(0, "", "TYPE_FP32", "100", IN_PROCESS))
    python_model(models, "picture", IDENTITY, pbtxt(dims="3, -1, -1", parameters=IN_PROCESS))
    python_model(models, "stream", STREAM, pbtxt(0, DECOUPLED, "TYPE_STRING", "1"))
    with serving(models, folder / "log", "--http-restricted-api=inference:X-Key=secret") as running:
        yield running


@pytest.fixture(scope="module")
def browser(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as running:
        running.open(f"http://{server.http}/v2/docs")
        running.until("document.querySelectorAll('form [role=tab]').length === 18")
        yield running
        assert running.complaints == []


def form(model: str) -> str:
    return f"document.querySelector('form[data-model={model}]')"


def enter(browser: Browser, model: str, text: str, field: str = "data") -> None:
    """Replace the text of a field, as if it was typed."""
    place = f"{form(model)}.querySelector('[name={field}]')"
    browser.evaluate(f"{place}.value = {json.dumps(text)}")
    browser.evaluate(f"{place}.dispatchEvent(new Event('input', {{ bubbles: true }}))")


def command(browser: Browser, model: str, language: str) -> str:
    browser.evaluate(f"{form(model)}.closest('details').open = true")
    browser.evaluate(f"{form(model)}.querySelector('[data-language={language}]').click()")
    text: str = browser.evaluate(f"{form(model)}.querySelector('[role=tabpanel]').textContent")
    return text


def run(text: str, tmp_path: Path, *, as_python: bool = False) -> str:
    """Run a command, or a program; return what it prints."""
    words = [sys.executable, "-c", text] if as_python else ["bash", "-c", text]
    path = f"{NERITE.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "KEY": "secret", "PATH": path}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, (text, done.stderr)
    return done.stdout


def test_numbers(browser: Browser, tmp_path: Path) -> None:
    require("curl")
    enter(browser, "numbers", "[[1, 2.5], [3, -4]]")
    assert browser.evaluate(f"{form('numbers')}.querySelector('[name=shape]').value") == "[2, 2]"
    output = json.loads(run(command(browser, "numbers", "curl"), tmp_path))["outputs"][0]
    assert (output["shape"], output["data"]) == ([2, 2], [1, 2.5, 3, -4])
    program = command(browser, "numbers", "python")
    assert run(program, tmp_path, as_python=True).split() == ["OUTPUT0", "[[", "1.", "2.5]", "[", "3.", "-4.", "]]"]
    assert "[[ 1. ,  2.5]," in run(command(browser, "numbers", "cli"), tmp_path)


def test_a_text(browser: Browser, tmp_path: Path) -> None:
    enter(browser, "words", TEXT)
    assert json.loads(run(command(browser, "words", "curl"), tmp_path))["outputs"][0]["data"] == [TEXT]
    assert str([TEXT.encode()]) in run(command(browser, "words", "python"), tmp_path, as_python=True)
    assert TEXT in run(command(browser, "words", "cli"), tmp_path)


def test_a_stream(browser: Browser, tmp_path: Path) -> None:
    enter(browser, "stream", TEXT)
    assert json.loads(run(command(browser, "stream", "curl"), tmp_path).removeprefix("data: "))["OUTPUT0"] == TEXT
    assert f"'OUTPUT0': {TEXT!r}" in run(command(browser, "stream", "python"), tmp_path, as_python=True)
    assert json.loads(run(command(browser, "stream", "cli"), tmp_path))["OUTPUT0"] == TEXT


def test_booleans(browser: Browser, tmp_path: Path) -> None:
    enter(browser, "flags", "[true, false, true]")
    assert json.loads(run(command(browser, "flags", "curl"), tmp_path))["outputs"][0]["data"] == [True, False, True]
    assert "[ True False  True]" in run(command(browser, "flags", "python"), tmp_path, as_python=True)
    assert "True" in run(command(browser, "flags", "cli"), tmp_path)


def test_zeros_and_random_values(browser: Browser, tmp_path: Path) -> None:
    told = json.loads(run(command(browser, "large", "curl"), tmp_path))["outputs"][0]
    assert (told["shape"], set(told["data"])) == ([100], {0})
    assert "np.zeros((100,), np.float32)" in command(browser, "large", "python")
    assert run(command(browser, "large", "python"), tmp_path, as_python=True).startswith("OUTPUT0 [0. 0.")
    assert "--random" in command(browser, "large", "cli")
    assert "[100]" in run(command(browser, "large", "cli"), tmp_path)


def test_a_picture_of_a_plausible_size(browser: Browser, tmp_path: Path) -> None:
    assert browser.evaluate(f"{form('picture')}.querySelector('[name=shape]').value") == "[1, 3, 224, 224]"
    output = json.loads(run(command(browser, "picture", "curl"), tmp_path))["outputs"][0]
    assert (output["shape"], len(output["data"])) == ([1, 3, 224, 224], 3 * 224 * 224)
    enter(browser, "picture", "[1, 3, 8, 9]", "shape")
    text = command(browser, "picture", "cli")
    assert text.endswith(" infer picture --random --shape INPUT0:3,8,9")
    assert "[1, 3, 8, 9]" in run(text, tmp_path)


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("data", "[1, 2", "The values of INPUT0 are not JSON: "),
        ("data", "[1, 2, 3]", "INPUT0 has 3 values, but its shape [1,2] has 2."),
        ("shape", "1, 2", "The shape of INPUT0 is not a list of sizes, such as [1, 3]."),
    ],
)
def test_what_is_wrong_is_said(browser: Browser, field: str, text: str, said: str) -> None:
    enter(browser, "numbers", "[1, 2]", "data")
    enter(browser, "numbers", "[1, 2]", "shape")
    enter(browser, "numbers", text, field)
    assert command(browser, "numbers", "python").startswith(said)
    browser.evaluate(f"{form('numbers')}.requestSubmit()")
    browser.until(f"{form('numbers')}.querySelector('output').textContent.startsWith({json.dumps(said)})")
    enter(browser, "numbers", "[1, 2]", "shape")
    enter(browser, "numbers", "[1, 2]", "data")


def test_what_is_entered_is_sent(browser: Browser) -> None:
    enter(browser, "numbers", "[[5, 6], [7, 8]]")
    browser.evaluate(f"{form('numbers')}.elements['X-Key'].value = 'secret'")
    browser.evaluate(f"{form('numbers')}.requestSubmit()")
    browser.until(f"{form('numbers')}.querySelector('output').textContent.includes('[5.0,6.0,7.0,8.0]')")


def test_the_tabs_have_keys(browser: Browser) -> None:
    browser.evaluate(f"{form('words')}.closest('details').open = true")
    browser.evaluate(f"{form('words')}.querySelector('[data-language=curl]').click()")
    for _ in range(2):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", windowsVirtualKeyCode=39)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="ArrowRight", windowsVirtualKeyCode=39)
    assert browser.evaluate("document.activeElement.dataset.language") == "cli"
    assert browser.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    # The choice is that of all models.
    chosen = "[...document.querySelectorAll('[aria-selected=true]')].every((tab) => tab.dataset.language === 'cli')"
    assert browser.evaluate(chosen)


def test_the_page_is_no_wider_than_a_phone(browser: Browser) -> None:
    browser.size(390, 800)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
