"""The console, in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from browser import Browser, browsing
from serving import HELD, IDENTITY, Serving, adds, let_go, python_model, serving

ON_DEMAND = ("--model-control-mode=explicit", "--load-model=plus", "--load-model=held")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("console") / "models"
    python_model(folder, "plus", adds(1))
    python_model(folder, "held", HELD)
    python_model(folder, "idle", IDENTITY)
    return folder


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(models, tmp_path_factory.mktemp("log") / "log", *ON_DEMAND) as running:
        yield running


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
    yield running_browser
    assert running_browser.complaints == []
    assert len({urlsplit(url).netloc for url in running_browser.requests}) == 1


def cell(model: str, column: str) -> str:
    """Return an expression for what a column of the overview says of a model."""
    return f"""(() => {{
        const heads = [...document.querySelectorAll(".models thead th")].map((head) => head.innerText.trim());
        const rows = [...document.querySelectorAll(".models tbody tr")];
        return rows.find((row) => row.cells[0].innerText === "{model}")?.cells[heads.indexOf("{column}")].innerText;
    }})()"""


def test_the_overview_shows_models_and_their_numbers(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui")
    browser.until(f"{cell('plus', 'State')} === 'ready'")
    assert browser.evaluate(cell("idle", "State")) == "not loaded"
    browser.until(f"{cell('plus', 'Requests/s')} === '0'")
    for _ in range(50):
        server.infer("plus", [1.0])
    browser.until(f"Number({cell('plus', 'Requests/s')}) > 0")
    assert re.fullmatch(r"[\d.]+ (µs|ms|s)", browser.evaluate(cell("plus", "p99")))
    assert browser.evaluate(cell("plus", "Memory")).endswith("MiB")
    assert browser.evaluate("document.querySelector('.tiles').innerText").startswith("Ready\n2 of 3")


def test_the_overview_is_filtered_and_sorted(server: Serving, browser: Browser) -> None:
    names = "[...document.querySelectorAll('.models tbody th')].map((cell) => cell.innerText).join(' ')"
    browser.open(f"http://{server.http}/ui")
    browser.until(f"{names} === 'held idle plus'")
    browser.evaluate("document.querySelector('thead button').click()")
    assert browser.evaluate(names) == "plus idle held"
    browser.tab_to("document.activeElement.type === 'search'")
    browser.press(*"not l")
    assert browser.evaluate(names) == "idle"


def test_a_model_is_drawn_live(models: Path, server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/models/plus/1")
    browser.until("document.querySelectorAll('.plot canvas').length === 4")
    for _ in range(50):
        server.infer("plus", [1.0])
    label = "document.querySelectorAll('.plot')[{}].getAttribute('aria-label')"
    browser.until(f"/^requests\\/s [1-9]/.test({label.format(0)})")
    assert re.match(r"p50 [\d.]+ (µs|ms), p90", browser.evaluate(label.format(1)))
    assert browser.evaluate(label.format(3)) == "rows, mean 1"
    browser.until("document.querySelector('.strip').getAttribute('aria-label').includes('compute')")
    assert "Instances\n1 (CPU)" in browser.evaluate("document.querySelector('.facts').innerText")
    assert '"max_batch_size": 8' in browser.evaluate("document.querySelector('details pre').textContent")


def test_models_are_unloaded_and_loaded_with_the_keyboard(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui")
    browser.until(f"{cell('plus', 'State')} === 'ready'")
    browser.tab_to("document.activeElement.getAttribute('aria-label') === 'Unload plus'")
    browser.press("Enter")
    browser.until("document.querySelector('dialog')?.open")
    browser.press("Escape")
    browser.until("document.activeElement.getAttribute('aria-label') === 'Unload plus'")
    assert server.ready("plus")
    browser.press("Enter")
    browser.until("document.activeElement.closest('dialog')?.open")
    browser.press("Enter")
    browser.until(f"{cell('plus', 'State')} === 'unloaded'")
    assert not server.ready("plus")
    browser.until("document.activeElement.getAttribute('aria-label') === 'Load plus'")
    browser.press("Enter")
    browser.until(f"{cell('plus', 'State')} === 'ready'")
    assert server.infer("plus", [1.0]) == [2.0]


def test_what_the_server_refuses_is_said(models: Path, browser: Browser, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log") as server:
        browser.open(f"http://{server.http}/ui#/models/plus")
        browser.until("!!document.querySelector('[aria-label=\"Reload plus\"]')")
        browser.evaluate("document.querySelector('[aria-label=\"Reload plus\"]').click()")
        browser.until(
            "document.getElementById('notice').innerText.includes('explicit model load / unload is not allowed')"
        )
    browser.until("document.getElementById('pulse').innerText === 'No connection'")
    assert [each for each in browser.complaints if "Failed to load resource" not in each] == []
    browser.complaints.clear()


def test_a_queue_is_seen(models: Path, server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui")
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(server.infer, "held", [-1.0]) for _ in range(3)]
        browser.until(f"{cell('held', 'Queue')} === '2'")
        let_go(models / "held")
        assert [each.result() for each in asked] == [[-1.0]] * 3
    browser.until(f"{cell('held', 'Queue')} === '0'")


def test_a_locked_server_asks_for_its_keys(models: Path, browser: Browser, tmp_path: Path) -> None:
    locks = ("model-repository:X-Admin=sesame", "statistics,metadata:X-Reader=secret")
    with serving(models, tmp_path / "log", *ON_DEMAND, *(f"--http-restricted-api={lock}" for lock in locks)) as server:
        browser.open(f"http://{server.http}/ui")
        for _ in locks:
            asked = browser.until("document.querySelector('dialog[open] code')?.innerText")
            browser.press(*{"X-Admin": "wrong", "X-Reader": "secret"}[asked], "Enter")
            browser.until(
                f"document.querySelector('dialog[open] code')?.innerText !== '{asked}' "
                "|| document.querySelector('dialog[open] p').innerText.includes('does not open')"
            )
        browser.until("document.querySelector('dialog[open] p')?.innerText.includes('does not open')")
        browser.press(*"sesame", "Enter")
        browser.until(f"Number({cell('plus', 'Requests/s')}) >= 0")
        assert [each for each in browser.complaints if "403" not in each] == []
        browser.complaints.clear()
        browser.call("Page.reload")
        browser.until(f"{cell('plus', 'State')} === 'ready'")  # Without a question: the tab has the keys.
    browser.complaints.clear()


def test_the_numbers_need_the_keys_of_statistics_and_of_metrics(models: Path, tmp_path: Path) -> None:
    locks = ("--http-restricted-api=statistics:X-A=a", "--http-restricted-api=metrics:X-B=b")
    with serving(models, tmp_path / "log", *ON_DEMAND, *locks) as server:
        assert server.ask("GET", "/ui")[0] == 200
        keys: dict[str, str] = {}
        for header, value in (("X-A", "a"), ("X-B", "b")):
            status, _, body = server.ask("GET", "/ui/metrics", **keys)
            assert (status, f"expecting header '{header}'".encode() in body) == (403, True)
            keys[header] = value
        status, headers, body = server.ask("GET", "/ui/metrics", **keys)
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert b'nv_inference_request_success{model="plus",version="1"} 0' in body


def test_the_files(server: Serving) -> None:
    status, headers, body = server.ask("GET", "/ui")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
    for name in re.findall(r'="ui/(.*?)"', body.decode()):
        status, headers, content = server.ask("GET", f"/ui/{name}")
        assert (status, headers["Cache-Control"], bool(content)) == (200, "no-cache", True)
        again = server.ask("GET", f"/ui/{name}", If_None_Match=headers["ETag"])
        assert (again[0], again[1]["ETag"], again[2]) == (304, headers["ETag"], b"")
    assert server.ask("GET", "/ui/")[:2][1]["Location"] == "../ui"
    assert server.ask("GET", "/ui/LICENSE")[0] == server.ask("GET", "/uix")[0] == 404
    assert server.ask("POST", "/ui")[0] == 405
    status, headers, body = server.ask("HEAD", "/ui")
    assert (status, int(headers["Content-Length"]) > 0, body) == (200, True, b"")


def test_the_console_can_be_left_out(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", *ON_DEMAND, "--allow-console=false") as server:
        assert [server.ask("GET", path)[0] for path in ("/ui", "/ui/console.js", "/ui/metrics")] == [404] * 3


def test_without_metrics_the_page_says_why_it_has_no_numbers(models: Path, browser: Browser, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", *ON_DEMAND, "--allow-metrics=false") as server:
        browser.open(f"http://{server.http}/ui")
        browser.until(f"{cell('plus', 'State')} === 'ready'")
        browser.until("document.getElementById('notice').innerText.includes('--allow-metrics=false')")
        assert browser.evaluate(cell("plus", "Requests/s")) == "\N{EN DASH}"
    browser.complaints.clear()
