"""The pages of rollouts in the console, in a real Chromium."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from browser import Browser, browsing
from serving import IN_PROCESS, Serving, adds, eventually, pbtxt, python_model, serving

CONFIG = pbtxt(parameters=IN_PROCESS) + "\nversion_policy { specific { versions: [ 1 ] } }"
FAILS = """
failures = itertools.count()

def execute(self, requests):
    sums = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() + 2 for request in requests]
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", each)], pb_utils.TritonError("broken weights") if next(failures) % 2 else None
        )
        for each in sums
    ]
"""
SPEC = {"to": 2, "steps": [50, 75, 100], "hold": "1h", "gate": ["errors=+50%,5%", "restarts<=0"]}


@pytest.fixture(scope="module")
def running_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    """A page that must not have complained, nor asked anything of anybody but one server."""
    running_browser.open("about:blank")
    running_browser.complaints.clear()
    running_browser.requests.clear()
    running_browser.size(1280, 800)
    yield running_browser
    assert running_browser.complaints == []
    assert len({urlsplit(url).netloc for url in running_browser.requests}) == 1


@contextmanager
def house(folder: Path, *flags: str, candidate: str = adds(2)) -> Iterator[Serving]:
    """Run a server with a model that serves version 1 and has a version 2."""
    python_model(folder / "models", "adder", adds(1), CONFIG)
    python_model(folder / "models", "adder", candidate, CONFIG, version=2)
    with serving(folder / "models", folder / "log", f"--rollout-state={folder / 'state'}", *flags) as server:
        yield server


def start(server: Serving, **other: object) -> None:
    code, _, body = server.ask("POST", "/v2/models/adder/rollout", {**SPEC, **other})
    assert code == 200, body
    eventually(lambda: state(server) != "checking", what="the check does not end")


def state(server: Serving) -> str:
    found: str = server.json("GET", "/v2/models/adder/rollout")["state"]
    return found


@contextmanager
def load(server: Serving) -> Iterator[None]:
    """Send one request after the other meanwhile."""
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [0]}]}
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            server.ask("POST", "/v2/models/adder/infer", body)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def at(server: Serving, page: str) -> str:
    return f"http://{server.http}/ui#/{page}"


def says(text: str, where: str = "body") -> str:
    """Return an expression for whether an element shows a text, whatever white space it has."""
    return f"document.querySelector('{where}')?.innerText.replace(/\\s+/g, ' ').includes({text!r})"


def press(browser: Browser, label: str) -> None:
    """Press the button with this label by the keyboard."""
    browser.tab_to(f"document.activeElement.getAttribute('aria-label') === {label!r}")
    browser.press("Enter")


SHADOW = """# TYPE nerite_shadow_requests_total counter
nerite_shadow_requests_total{arm="adder:2",route="adder"} 1200
nerite_shadow_compared_total{arm="adder:2",result="equal",route="adder"} 600
nerite_shadow_compared_total{arm="adder:2",result="close",route="adder"} 300
nerite_shadow_compared_total{arm="adder:2",result="shadow_failed",route="adder"} 100
nerite_shadow_dropped_total{arm="adder:2",reason="queue_full",route="adder"} 200
nerite_shadow_dropped_total{arm="adder:2",reason="late",route="adder"} 0
nerite_shadow_labels_total{arm="adder:2",route="adder"} 40
nerite_shadow_labels_agreed_total{arm="adder:2",route="adder"} 39
nerite_shadow_distance_bucket{arm="adder:2",route="adder",le="0.001"} 100
nerite_shadow_distance_bucket{arm="adder:2",route="adder",le="+Inf"} 100
nerite_shadow_distance_sum{arm="adder:2",route="adder"} 0.05
nerite_shadow_distance_count{arm="adder:2",route="adder"} 100
nerite_shadow_latency_difference_seconds_bucket{arm="adder:2",route="adder",le="+Inf"} 2
nerite_shadow_latency_difference_seconds_sum{arm="adder:2",route="adder"} 0.006
nerite_shadow_latency_difference_seconds_count{arm="adder:2",route="adder"} 2
nerite_queue_requests{model="adder",version="1"} 3
"""
PROOF = (
    "Number(/proof ([\\d.,e]+)/.exec(document.querySelector('.gate .plot')?.getAttribute('aria-label'))?.[1]"
    ".replaceAll(',', ''))"
)
FITS = "document.documentElement.scrollWidth <= innerWidth"


def test_a_running_rollout_is_shown_and_its_evidence_grows(browser: Browser, tmp_path: Path) -> None:
    with house(tmp_path) as server, load(server):
        browser.open(at(server, "rollouts"))
        browser.until(says("There has been no rollout. Start one with: nerite rollout start MODEL --to VERSION"))
        start(server)
        browser.until(says("adder running 1 → 2 50 % 1 of 3", ".list tbody"))
        browser.tab_to("document.activeElement.innerText === 'adder'")
        browser.press("Enter")
        browser.until(
            "document.querySelector('h1')?.innerText === 'adder' && document.querySelectorAll('canvas').length === 1"
        )
        assert browser.evaluate("document.querySelector('.path [aria-current=step]').innerText") == "50 %"
        assert browser.evaluate(says("step 1 of 3: ", ".rollout"))
        first = browser.until(PROOF)
        browser.until(f"{PROOF} > {first}")
        browser.until(says("Bad requests, candidate 0 % (0 % ", ".gate"))
        assert browser.evaluate(says("restarts<=0"))
        rows = "[...document.querySelectorAll('.halves tbody tr')].map((row) => row.innerText.replaceAll('\\t', ' '))"
        found = browser.evaluate(rows)
        assert found[:2] == ["Version 1 2 ", "Weight 50 % 50 % "]
        assert any(re.fullmatch(r"p99 [\d.]+ (µs|ms) [\d.]+ (µs|ms) .[\d.]+ %", row) for row in found)
        browser.until("document.querySelectorAll('.decisions li').length === 1")
        browser.tab_to("document.activeElement.tagName === 'SUMMARY'")
        browser.press("Enter")
        browser.until(says("baseline 1 50 % 0 0", ".decisions"))
        for width in (390, 1280):
            browser.size(width, 900)
            browser.until(FITS)
        browser.open(at(server, ""))
        browser.until("[...document.querySelectorAll('.models .mark')].filter((mark) => !mark.hidden).length === 2")
        assert browser.evaluate("document.querySelector('.models .mark').getAttribute('href')") == "#/rollout/adder"
        for width in (390, 1280):
            browser.size(width, 900)
            browser.until(FITS)


def test_a_rollout_is_paused_resumed_promoted_and_cleared_with_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    with house(tmp_path) as server:
        start(server)
        browser.open(at(server, "rollout/adder"))
        browser.until("!!document.querySelector('[aria-label=\"Pause adder\"]')")
        press(browser, "Pause adder")
        browser.until(says("Version 2 of adder stays at 50 % of the requests", "dialog[open]"))
        browser.press("Escape")
        browser.until("!document.querySelector('dialog')")
        assert state(server) == "running"
        browser.press("Enter")
        browser.until("document.activeElement.closest('dialog')?.open")
        browser.press("Enter")
        browser.until("!!document.querySelector('[aria-label=\"Resume adder\"]:not([hidden])')")
        assert state(server) == "paused"
        press(browser, "Resume adder")
        browser.until("document.activeElement.closest('dialog')?.open")
        browser.press("Enter")
        browser.until(says("running", ".head .state"))
        press(browser, "Promote adder")
        browser.until(
            says("Promote version 2 of adder? Version 2 gets all requests to adder that name no version.", "dialog")
        )
        assert browser.evaluate(says("It is not shown that version 2 is not worse: ", "dialog"))
        assert browser.evaluate("document.activeElement.innerText") == "Promote without evidence"
        browser.press("Enter")
        browser.until(says("promoted", ".head .state"))
        eventually(lambda: server.infer("adder", [1.0]) == [3.0])
        browser.until("document.querySelectorAll('.decisions li').length === 4")
        press(browser, "Clear adder")
        browser.until(says("The server forgets the rollout of adder", "dialog[open]"))
        browser.press("Enter")
        browser.until("document.querySelector('h1').innerText === 'Rollouts'")
        browser.until(says("adder promoted 1 → 2", "section .list tbody"))
        browser.evaluate(
            "[...document.querySelectorAll('.list a')].find((link) => link.href.includes('/adder/')).click()"
        )
        browser.until(says("an operator promoted the candidate without sufficient evidence", ".decision"))
        assert browser.evaluate(says("errors=+50%,5%", ".gate"))


def test_what_the_judge_found_is_shown_and_stays(browser: Browser, tmp_path: Path) -> None:
    with house(tmp_path, candidate=f"import itertools\n{FAILS}") as server, load(server):
        start(server, force=True)
        eventually(lambda: state(server) == "rolled_back")
        browser.open(at(server, "rollout/adder"))
        browser.until(says("rolled back", ".head .state"))
        assert browser.evaluate(says("worse", ".judge .state"))
        assert browser.evaluate("document.querySelector('.path .stopped').innerText") == "50 %"
        assert browser.evaluate("document.querySelectorAll('.path [aria-current]').length") == 0


def test_a_rollout_is_aborted(browser: Browser, tmp_path: Path) -> None:
    with house(tmp_path) as server:
        start(server)
        browser.open(at(server, "rollout/adder"))
        browser.until("!!document.querySelector('[aria-label=\"Abort adder\"]')")
        press(browser, "Abort adder")
        browser.until(says("Abort the rollout of adder? Version 1 gets all requests to adder again.", "dialog[open]"))
        browser.press("Enter")
        browser.until(says("aborted", ".head .state"))
        assert state(server) == "aborted"
        assert server.infer("adder", [1.0]) == [2.0]


def test_what_cannot_be_done_any_more_is_said(browser: Browser, tmp_path: Path) -> None:
    with house(tmp_path) as server:
        start(server)
        browser.open(at(server, "rollout/adder"))
        browser.until("!!document.querySelector('[aria-label=\"Pause adder\"]')")
        press(browser, "Pause adder")
        browser.until("document.activeElement.closest('dialog')?.open")
        assert server.ask("POST", "/v2/models/adder/rollout/abort")[0] == 200
        browser.press("Enter")
        browser.until(says("cannot pause a rollout that is aborted: it must be running", "#notice"))
        browser.open(at(server, "rollout/nobody"))
        browser.until(says("nobody", "#notice"))
    assert [each for each in browser.complaints if "409" not in each and "404" not in each and "400" not in each] == []
    browser.complaints.clear()


def test_shadows_are_read_from_the_metrics(browser: Browser, tmp_path: Path) -> None:
    with house(tmp_path) as server:
        browser.open(at(server, "rollouts"))
        browser.until(says("There has been no rollout"))
        assert browser.evaluate("[...document.querySelectorAll('h2')].every((head) => !head.offsetParent)")
        shown = f"""(async () => {{
            const {{ parse }} = await import("./ui/exposition.js");
            const {{ Shadows }} = await import("./ui/shadows.js");
            const read = parse({json.dumps(SHADOW)});
            const shadows = new Shadows({{ history: read }});
            document.body.append(shadows.root);
            shadows.update();
            const cells = [...shadows.root.querySelector("tbody").children].map((row) => [...row.children]);
            return JSON.stringify([cells.map((row) => row.map((cell) => cell.innerText)), [...read.versions.values()]]);
        }})()"""
        (row,), versions = json.loads(browser.evaluate(shown))
    assert row[:5] == ["adder", "adder:2", "1,200", "90 %", "97.5 %"]
    assert row[5:9] == ["0.0005", "0.00099", "\N{EN DASH}", "3 ms"]
    assert row[9:] == ["600 equal, 300 close, 100 shadow failed", "200 queue full"]
    assert versions == [{"queue": 3}]


def test_a_page_that_needs_a_key_says_which(browser: Browser, tmp_path: Path) -> None:
    key = "--http-restricted-api=model-repository:X-Admin=sesame"
    with house(tmp_path, key) as server:
        code, _, body = server.ask("POST", "/v2/models/adder/rollout", SPEC, X_Admin="sesame")
        assert code == 200, body
        browser.open(at(server, "rollout/adder"))
        browser.until(says("X-Admin", "dialog[open]"))
        browser.press("Escape")
        browser.until(says("needs the key of the category model-repository", ".locked:not([hidden])"))
        browser.until(says("expecting header 'X-Admin'", "#notice"))
        browser.tab_to("document.activeElement.innerText === 'Enter the key'")
        browser.press("Enter")
        browser.until("document.activeElement.closest('dialog')?.open")
        browser.press(*"sesame", "Enter")
        browser.until(says("version 1 → 2", ".head"))
        browser.until("document.querySelector('.locked').hidden")
        assert [each for each in browser.complaints if "403" not in each] == []
        browser.complaints.clear()
    browser.complaints.clear()
