"""``make serve-llm`` in a new clone, and the page of examples/assistant followed: ``make exam-assistant``.

Downloads 190 MB. Prints how long each part took.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import ROOT, Page, run
from ports import free_ports
from serving import Serving

PAGE = Page("examples/assistant/README.md")
PATIENCE = 600
RIGHT = {
    "What is the capital of France?": "Paris",
    "Name the planets of the solar system.": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, and Neptune",
    "What does HTTP stand for?": "Hypertext Transfer Protocol",
}
GUIDED = {
    "How do I change the HTTP port?": "`--http-port`",
    "How do I load models on demand?": "--model-control-mode=demand",
    "Can keys be rotated without a restart?": "docs/access.md",
}
pytestmark = pytest.mark.timeout(2 * PATIENCE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistant") / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def server(clone: Path) -> Iterator[Serving]:
    http, grpc, metrics = free_ports(3)
    flags = f"--http-port={http} --grpc-port={grpc} --metrics-port={metrics}"
    log = clone / "log"
    began = time.monotonic()
    with log.open("wb") as sink:
        command = ["make", "serve-llm", f"FLAGS={flags}"]
        process = subprocess.Popen(command, cwd=clone, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    running = Serving(process, log)
    try:
        while running.started not in running.text:
            assert process.poll() is None, running.text
            assert time.monotonic() < began + PATIENCE
            time.sleep(0.1)
        print(f"\nmake serve-llm: {time.monotonic() - began:.0f} s from a new clone until the ports are open")
        running.ports = {"HTTPService": http, "GRPCInferenceService": grpc, "Metrics": metrics}
        yield running
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def chatted(clone: Path, server: Serving, model: str, question: str) -> str:
    began = time.monotonic()
    command = [str(clone / ".venv/llm/bin/nerite"), "chat", model, "--url", server.http, "--max-tokens", "80"]
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=PATIENCE, check=True)
    print(f"{time.monotonic() - began:5.1f} s  {model}: {question}\n         {done.stdout.strip()[:120]}")
    return done.stdout


@pytest.mark.parametrize("question", RIGHT)
def test_right_answers(clone: Path, server: Serving, question: str) -> None:
    assert RIGHT[question] in chatted(clone, server, "assistant", question)


@pytest.mark.parametrize("question", GUIDED)
def test_the_guide(clone: Path, server: Serving, question: str) -> None:
    assert GUIDED[question] in chatted(clone, server, "guide", question)


def test_the_page(clone: Path, server: Serving) -> None:
    activate, *asked = PAGE.block("nerite chat assistant").strip().splitlines()
    shown = PAGE.block("HTTP stands for")
    for command in asked:
        said = run(f"{activate} && {command} --url {server.http}", cwd=clone, seconds=PATIENCE)
        assert said.strip() in shown
    answer = json.loads(run(PAGE.block("json_schema"), server))
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"city", "country"}


def test_it_is_quick_the_second_time(clone: Path, server: Serving) -> None:
    made = subprocess.run(["make", "--dry-run", "serve-llm"], cwd=clone, capture_output=True, text=True, check=True)
    assert [line for line in made.stdout.splitlines() if "pip install" in line or "build.py" in line] == []
