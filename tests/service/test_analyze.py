"""``nerite analyze`` finds the better configuration of a real model, and goes on where it was stopped."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from nerite.config.text import parse_text
from serving import NERITE, PATIENCE, pbtxt, python_model

SLEEPS = """
def execute(self, requests):
    time.sleep(0.02)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""
BRIEF = ("--warm-up", "0.05", "--window", "0.1", "--windows", "3", "--concurrency", "8")
FEW = ("--search", "brute", "--set", "max_batch=1,8", "--set", "delay=0", "--set", "instances=1")
"""An execution takes as long for eight as for one, so that eight is the better batch by far."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    python_model(tmp_path / "models", "sleeps", SLEEPS, "# slow\n" + pbtxt(batch=1))
    # Models beside it are not served.
    python_model(tmp_path / "models", "broken", "def execute(self, requests): no way")
    return tmp_path


def analyze(folder: Path, *arguments: str, status: int = 0) -> str:
    command = [str(NERITE), "analyze", *arguments, "--model-repository", "models", *BRIEF]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_the_better_configuration_is_found_and_written_only_if_wanted(folder: Path) -> None:
    file = folder / "models" / "sleeps" / "config.pbtxt"
    before = file.read_text()
    said = analyze(folder, "sleeps", *FEW, "--html", "page.html")
    assert "| max_batch=8 " in said
    page = (folder / "page.html").read_text()
    titles = ["Latency by throughput", "Search", "Throughput", "Memory", "Changes", "Measurements", "Origin"]
    assert re.findall("<h2>(.*?)</h2>", page) == titles
    assert page.count('class="plot"') == 2 and page.count('class="bars"') == 2
    assert '<span class="added">+max_batch_size: 8</span>' in page
    assert "<script src" not in page and "url(" not in page
    assert "\n-max_batch_size: 1\n+max_batch_size: 8\n" in said
    assert file.read_text() == before

    checkpoint = folder / "sleeps.analysis.jsonl"
    lines = checkpoint.read_text().splitlines(keepends=True)
    _, now, then, *again = map(json.loads, lines)
    assert then["figures"][0]["rate"] > 2 * now["figures"][0]["rate"]
    assert then["memory"] > 0
    assert [(each["turn"], each["changes"]) for each in again] == [
        (turn, changes) for turn in (1, 2) for changes in ({"max_batch": 8}, {})
    ]

    # Limits that nothing keeps to. What was measured is read.
    said = analyze(folder, "sleeps", *FEW, "--max-p99", "1", "--apply", status=1)
    assert "No configuration meets the limits." in said
    assert file.read_text() == before
    assert checkpoint.read_text().splitlines(keepends=True) == lines

    # As if it had been stopped: what was measured is read, and not measured again.
    now["figures"][0]["rate"] = 1.0
    checkpoint.write_text("".join([lines[0], json.dumps(now) + "\n", *lines[2:-1], lines[-1][:50]]))
    said = analyze(folder, "sleeps", *FEW, "--apply")
    assert "has 5 measurements" in said
    assert checkpoint.read_text().splitlines(keepends=True)[2:-1] == lines[2:-1]
    assert json.loads(checkpoint.read_text().splitlines()[-1])["turn"] == 2
    assert "  1  current configuration: 1/s" in said
    assert file.read_text() == before.replace("max_batch_size: 1\n", "max_batch_size: 8\n")
    assert parse_text(file.read_text()).config.max_batch_size == 8

    # The model is another one.
    (folder / "models" / "sleeps" / "1" / "model.py").touch()
    said = analyze(folder, "sleeps", *FEW, status=1)
    assert "sleeps.analysis.jsonl was measured under other conditions." in said
    assert re.search(r"the files of the models:\n +sleeps/1/model.py: [\d,]+ bytes of .* then, .* now\n", said)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["slept"], 1, "Did you mean 'sleeps'?"),
        (["broken"], 1, "'broken' cannot be loaded"),
        (["sleeps", "--shape", "INPUT1:2"], 1, "there is no input 'INPUT1'"),
        (["sleeps", "--set", "threads=1,2"], 1, "has no setting 'threads' that can vary"),
        (["sleeps", "--set", "max_bach=1"], 2, "Did you mean 'max_batch'?"),
        (["sleeps", "--set", "max_batch"], 2, "has no values"),
        (["sleeps", "--set", "max_batch=many"], 2, "must be integers"),
        (["sleeps", "--max-p99", "0"], 2, "is not greater than 0"),
    ],
)
def test_what_cannot_be_done_is_said(folder: Path, arguments: list[str], status: int, says: str) -> None:
    assert says in analyze(folder, *arguments, status=status)
