"""What the server keeps for the console: samples of an hour and the recent log; and what the pages make of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, browsing
from serving import IDENTITY, IN_PROCESS, Serving, adds, eventually, pbtxt, python_model, serving

BROKEN = """
def initialize(self, args):
    self.weights = self.load(args["model_name"])

def execute(self, requests):
    return []

def load(self, name):
    return np.load(f"weights of {name}.npy")  # fails in a file of numpy, which nobody should correct
"""
LOUD = """
def execute(self, requests):
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().flat[0].decode()
        pb_utils.Logger.log_error(text) if text.startswith("bad") else print(text, flush=True)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([b"ok"], object))]) for _ in requests]
"""
WORDS = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "BYTES", "data": ["said"]}]}
CARDS = 992
"""Up to this many pixels, rows of tables are cards."""
PAGES = (
    *("", "models/plus", "models/broken", "models/loud", "workers", "rollouts", "background", "log", "settings"),
    *("tenants", "chat"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("history")
    models = folder / "models"
    python_model(models, "plus", adds(1))
    python_model(models, "broken", BROKEN)
    python_model(models, "loud", LOUD, pbtxt(0, "", "TYPE_STRING", "1"))
    python_model(
        models, "a-model-whose-name-is-rather-long-and-has-no-space-in-it", IDENTITY, pbtxt(parameters=IN_PROCESS)
    )
    flags = ("--model-control-mode=explicit", "--load-model=*", "--strict-readiness=false", "--exit-on-error=false")
    with serving(models, folder / "log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def running_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    running_browser.size(1280, 900)
    running_browser.open("about:blank")
    running_browser.complaints.clear()
    running_browser.requests.clear()
    yield running_browser
    assert running_browser.complaints == []


def history(server: Serving, query: str = "") -> dict[str, Any]:
    found: dict[str, Any] = server.json("GET", f"/ui/history{query}")
    return found


def records(server: Serving, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.json("GET", f"/ui/log{query}")["records"]
    return found


def say(server: Serving, text: str) -> None:
    (tensor,) = WORDS["inputs"]
    assert server.ask("POST", "/v2/models/loud/infer", {"inputs": [{**tensor, "data": [text]}]})[0] == 200


def test_samples_are_kept(server: Serving) -> None:
    asked = time.time()
    for _ in range(10):
        server.infer("plus", [1.0])

    def sampled() -> list[float]:
        found = history(server, "?model=plus&version=1")
        return [rate for rate in found["lines"].get("requests", []) if rate]

    eventually(sampled)
    found = history(server, "?model=plus&version=1&seconds=300")
    assert sum(rate or 0 for rate in found["lines"]["requests"]) * found["interval"] == pytest.approx(10, rel=0.2)
    assert {len(line) for line in found["lines"].values()} == {len(found["times"])}
    assert abs(found["times"][-1] - asked) < 60
    whole = history(server)
    assert sum(whole["lines"]["requests"]) > 0
    (plus,) = [each for each in whole["versions"] if each["model"] == "plus"]
    assert plus["version"] == "1" and sum(plus["requests"]) > 0
    unknown = history(server, "?model=nobody")
    assert set(unknown["lines"]["requests"]) == {None}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/ui/history?seconds=3601", "'seconds' must be a whole number from 0 to 3600, got: '3601'"),
        ("/ui/history?seconds=-1", "got: '-1'"),
        ("/ui/history?level=error", "'level' is not a parameter, or given twice. There are: seconds, model, version."),
        ("/ui/history?model=a&model=b", "'model' is not a parameter, or given twice."),
        ("/ui/log?level=loud", "'level' must be one of error, warning, info, verbose, got: 'loud'"),
        ("/ui/log?after=99999999999999999999", "'after' must be a whole number"),
        ("/ui/log?" + "&".join(f"p{number}=1" for number in range(9)), "at most 5 parameters"),
    ],
)
def test_what_may_not_be_asked(server: Serving, path: str, said: str) -> None:
    status, _, body = server.ask("GET", path)
    assert (status, said in json.loads(body)["error"]) == (400, True), body


def test_pages_do_not_open_empty(server: Serving, browser: Browser) -> None:
    server.infer("plus", [1.0])
    eventually(lambda: any(history(server, "?model=plus&version=1")["lines"].get("requests", [])))
    browser.open(f"http://{server.http}/ui#/models/plus")
    browser.until("document.querySelectorAll('.plot canvas').length === 4")
    browser.until("/^requests\\/s [\\d.]+/.test(document.querySelector('.plot').getAttribute('aria-label'))")
    browser.tab_to("document.activeElement.name === 'range'")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", windowsVirtualKeyCode=39)
    browser.call("Input.dispatchKeyEvent", type="keyUp", key="ArrowRight", windowsVirtualKeyCode=39)
    browser.until("document.querySelector('.range :checked').parentElement.innerText === '15 min'")
    eventually(lambda: browser.text and any("/ui/history?seconds=900&model=plus" in each for each in browser.requests))
    browser.evaluate("location.hash = '#/'")
    browser.until("!!document.querySelector('.spark:not([data-empty]) .line')?.getAttribute('points')")
    assert browser.evaluate("document.querySelector('.range :checked').parentElement.innerText") == "15 min"
    assert browser.evaluate("document.querySelector('.idle th').innerText") is not None


def test_a_failure_comes_first_and_is_explained(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui")
    browser.until("document.querySelector('.failures li')?.innerText.includes('weights of broken')")
    assert browser.evaluate("document.querySelector('.models tbody tr').cells[0].innerText") == "broken"
    lines = browser.evaluate("document.querySelector('.failures li').innerText")
    assert "broken/1/model.py:" in lines
    browser.tab_to("!!document.activeElement.closest('.failures li')")
    browser.press("Enter")
    browser.until("document.querySelector('h1').innerText === 'broken'")
    browser.until("document.querySelector('.failures .log li')?.innerText.length > 0")
    told = browser.evaluate("document.querySelector('.failures').innerText")
    assert "No such file or directory: 'weights of broken.npy'" in told
    line = next(number for number, text in enumerate(model_lines(server), 1) if "return np.load" in text)
    assert f"model.py:{line} in load" in told
    assert f"model.py, line {line}, or what it depends on. Then load it again." in told
    failed = (
        "document.querySelector('.failures .log').innerText.split(\"failed to load 'broken' version 1\").length - 1"
    )
    browser.until(f"{failed} === 1")
    browser.tab_to("document.activeElement.innerText === 'Load again'")
    browser.press("Enter")
    browser.until(f"{failed} === 2")
    assert [each for each in browser.complaints if "400" not in each] == []
    browser.complaints.clear()


def model_lines(server: Serving) -> list[str]:
    place = next(each for each in records(server, "?model=broken") if "/broken/1/model.py" in each["message"])
    (path,) = set(re.findall(r"\S+/broken/1/model\.py", place["message"]))
    return Path(path).read_text().splitlines()


def test_the_log_is_chosen_by_model_and_level(server: Serving, browser: Browser) -> None:
    for text in ("nice", "bad luck"):
        say(server, text)
    server.infer("plus", [1.0])
    eventually(lambda: {"nice", "bad luck"} <= {each["message"] for each in records(server, "?model=loud")})
    assert {each["instance"] for each in records(server, "?model=loud") if "instance" in each} == {"loud_0_0"}
    assert [each["message"] for each in records(server, "?model=loud&level=error")] == ["bad luck"]
    last = server.json("GET", "/ui/log")["last"]
    assert all(each["number"] > last for each in records(server, f"?after={last}"))
    browser.open(f"http://{server.http}/ui#/log")
    shown = "[...document.querySelectorAll('.log pre')].map((line) => line.innerText)"
    browser.until(f"{shown}.includes('nice') && {shown}.some((line) => line.includes('broken'))")
    browser.until("[...document.querySelectorAll('[name=model] option')].some((option) => option.value === 'loud')")
    browser.evaluate("document.querySelector('[name=model]').value = 'loud'")
    browser.evaluate("document.querySelector('[name=model]').dispatchEvent(new Event('change'))")
    browser.until(f"{shown}.includes('bad luck') && !{shown}.some((line) => line.includes('broken'))")
    browser.evaluate("document.querySelector('[name=level]').value = 'error'")
    browser.evaluate("document.querySelector('[name=level]').dispatchEvent(new Event('change'))")
    browser.until(f"{shown}.join('|') === 'bad luck'")
    assert browser.evaluate("location.hash") == "#/log/loud/error"
    say(server, "bad again")
    browser.until(f"{shown}.join('|') === 'bad luck|bad again'")


def test_the_log_is_for_those_with_the_key(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "plus", adds(1))
    key = "--http-restricted-api=logging,statistics:X-Key=k"
    with serving(tmp_path / "models", tmp_path / "log", "--http-address=0.0.0.0", key) as server:
        assert server.ask("GET", "/ui/log")[0] == 403
        status, headers, body = server.ask("GET", "/ui/log", X_Key="k")
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert any("loading: plus:1" in each["message"] for each in json.loads(body)["records"])


KEEPS = "def initialize(self, args):\n    self.kept = np.ones(100_000_000, np.uint8)\n"


def test_memory_in_the_process_of_the_server(browser: Browser, tmp_path: Path) -> None:
    """It is measured by what the process grows by, and estimated where it grows by less than the files.

    One is loaded after the other: the growth during loads that overlap is divided by the size of their files.
    """
    inside = pbtxt(parameters=IN_PROCESS)
    python_model(tmp_path / "models", "grows", KEEPS + IDENTITY, inside)
    folder = python_model(tmp_path / "models", "maps", IDENTITY, inside)
    (folder / "1" / "weights.bin").write_bytes(bytes(50_000_000))
    explicit = ("--model-control-mode=explicit", "--load-model=grows")
    with serving(tmp_path / "models", tmp_path / "log", *explicit) as server:
        assert server.ask("POST", "/v2/repository/models/maps/load")[0] == 200
        page = server.ask("GET", "/metrics")[2].decode()
        memory = dict(re.findall(r'nerite_model_memory_bytes{model="(\w+)",version="1"} (\d+)', page))
        assert 95_000_000 <= int(memory["grows"]) < 120_000_000
        assert 50_000_000 <= int(memory["maps"]) < 50_010_000
        lines = [line for line in page.splitlines() if line.startswith("nerite_model_memory_source{")]
        sources = {re.findall('model="(\\w+)"', line)[0]: re.findall('source="(\\w+)"', line)[0] for line in lines}
        assert sources == {"grows": "load", "maps": "files"}
        browser.open(f"http://{server.http}/ui")
        cell = "[...document.querySelectorAll('td[data-head=Memory]')].map((each) => each.innerText)"
        browser.until(f"/^(9|10|11)\\d[\\d.]* MiB, ≈ 47.7 MiB$/.test({cell}.join(', '))")
        browser.open(f"http://{server.http}/ui#/models/grows")
        facts = "document.querySelector('.facts')?.innerText"
        browser.until(f"{facts}.includes('\\nmeasured as the growth of the server')")
        browser.open(f"http://{server.http}/ui#/models/maps")
        browser.until(f"{facts}.includes('\\nestimated by the size of its files')")


@pytest.mark.parametrize("width", [390, 768, 900, 1050, 1280])
def test_no_page_is_wider_than_the_window(server: Serving, browser: Browser, width: int) -> None:
    browser.size(width, 800)
    browser.open(f"http://{server.http}/ui#/")
    browser.until("document.querySelectorAll('.models tbody tr').length === 4")
    for page in PAGES:
        browser.evaluate(f"location.hash = '#/{page}'")
        browser.until("!!document.querySelector('main h1')?.offsetParent")
        browser.until("!document.querySelector('main').innerText.includes('…\\n')")
        # What scrolls on its own may be wider; the rows of tables are cards on phones.
        scrolls = "thead, .graph, pre, svg, .plot, .unseen" + (", .wide" if width > CARDS else "")
        wide = browser.evaluate(
            "[document.documentElement.scrollWidth, ...[...document.querySelectorAll('header *, main *')]"
            f".filter((each) => !each.closest('{scrolls}') && each.offsetParent)"
            ".map((each) => Math.floor(each.getBoundingClientRect().right))]"
        )
        assert max(wide) <= width, page


def test_rows_are_cards_on_phones(server: Serving, browser: Browser) -> None:
    browser.size(390, 800)
    browser.open(f"http://{server.http}/ui#/")
    browser.until("document.querySelectorAll('.models tbody tr').length === 4")
    row = "document.querySelectorAll('.models tbody tr')[1]"
    assert browser.evaluate(f"getComputedStyle({row}).display") == "grid"
    heads = f"[...{row}.cells].map((cell) => getComputedStyle(cell, '::before').content.replaceAll('\"', ''))"
    assert {"Requests/s", "p99", "Memory"} <= set(browser.evaluate(heads))
    browser.size(900, 800)
    lefts = "[...document.querySelectorAll('.models tbody tr')].map((row) => row.getBoundingClientRect().left)"
    browser.until(f"new Set({lefts}).size === 2")
    browser.size(1280, 800)
    browser.until(f"getComputedStyle({row}).display === 'table-row'")
    ends = "[...document.querySelectorAll('.models td.number')].every((cell) => cell.scrollWidth <= cell.clientWidth)"
    assert browser.evaluate(ends), "numbers beside the small lines stay in their column"


def test_settings_are_explained(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/settings")
    browser.until("!!document.querySelector('[name=log_info]') && !!document.querySelector('[name=trace_level]')")
    unexplained = browser.evaluate(
        "[...document.querySelectorAll('.fields [aria-describedby]')]"
        ".filter((each) => !document.getElementById(each.getAttribute('aria-describedby')).innerText)"
        ".map((each) => each.name)"
    )
    assert unexplained == []
