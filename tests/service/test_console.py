"""The console, in a real Chromium."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image

from browser import Browser, browsing
from pages import run
from serving import (
    ALL_TENANTS,
    HELD,
    IDENTITY,
    IN_PROCESS,
    NERITE,
    Serving,
    adds,
    ensemble,
    eventually,
    let_go,
    pbtxt,
    python_model,
    serving,
    step,
)

ON_DEMAND = ("--model-control-mode=explicit", "--load-model=plus", "--load-model=held")
OTHERS = ("--load-model=twice", "--load-model=speaker", "--load-model=colour")
SPEAKER = """
def execute(self, requests):
    folder = os.path.dirname(__file__)
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().flat[0].decode()
        sender = request.get_response_sender()
        for word in text.split():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([word + "! "], object))]))
            while word == "wait" and not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.001)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TALKER = """
def execute(self, requests):
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().flat[0].decode()
        sender = request.get_response_sender()
        for word in text.split():
            word = np.array([[word + " "]], object)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", word)]))
            while word.flat[0] == "wait " and not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
                if sender.is_cancelled():
                    print("was stopped", flush=True)
                    break
                time.sleep(0.001)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TALKS = """
backend: "python"
max_batch_size: 4
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }]
instance_group [{ kind: KIND_CPU }]
model_transaction_policy { decoupled: true }
"""
COLOUR = """
def execute(self, requests):
    pictures = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
    means = [picture.mean(axis=(0, 1)).astype(np.float32) for picture in pictures]
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", mean)]) for mean in means]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("console") / "models"
    python_model(folder, "plus", adds(1))
    python_model(folder, "held", HELD)
    python_model(folder, "idle", IDENTITY)
    ensemble(folder, "twice", step("plus", "INPUT0", "between"), step("plus", "between", "OUTPUT0"))
    decoupled = "model_transaction_policy { decoupled: true }"
    python_model(folder, "speaker", SPEAKER, pbtxt(0, decoupled, "TYPE_STRING", "1"))
    picture = 'input { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }'
    output = 'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 3 ] }'
    python_model(folder, "colour", COLOUR, f'backend: "python" {picture} {output}')
    return folder


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(models, tmp_path_factory.mktemp("log") / "log", *ON_DEMAND, *OTHERS) as running:
        yield running


@pytest.fixture(scope="module")
def running_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    """A page that must not have complained, nor asked anything of anybody but one server."""
    running_browser.size(1280, 900)
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
    assert browser.evaluate("document.querySelector('.tiles').innerText").startswith("Ready\n5 of 6")


def test_the_overview_is_filtered_and_sorted(server: Serving, browser: Browser) -> None:
    names = "[...document.querySelectorAll('.models tbody th')].map((cell) => cell.innerText).join(' ')"
    browser.open(f"http://{server.http}/ui")
    browser.until(f"{names} === 'colour held idle plus speaker twice'")
    browser.evaluate("document.querySelector('thead button').click()")
    assert browser.evaluate(names) == "twice speaker plus idle held colour"
    browser.tab_to("document.activeElement.type === 'search'")
    browser.press(*"not l")
    assert browser.evaluate(names) == "idle"


def test_a_model_is_drawn_live(models: Path, server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/models/plus/1")
    browser.until("document.querySelectorAll('.plot canvas').length === 4")
    for _ in range(50):
        server.infer("plus", [1.0])
    label = "document.querySelectorAll('.plot')[{}].getAttribute('aria-label')"
    drawn = (
        f"/^requests\\/s [1-9]/.test({label.format(0)})",
        f"/p50 [\\d.]+ (µs|ms), p90/.test({label.format(1)})",
        f"{label.format(3)} === 'rows, mean 1'",
    )
    browser.until(" && ".join(drawn))
    browser.until("document.querySelector('.strip').getAttribute('aria-label').includes('compute')")
    assert "Instances\n1 (CPU)" in browser.evaluate("document.querySelector('.facts').innerText")
    assert '"max_batch_size": 8' in browser.evaluate("document.querySelector('details pre').textContent")


def open_menu(browser: Browser, model: str, item: str) -> None:
    """Open the menu of a model with the keyboard, and go to an item."""
    browser.tab_to(f"document.activeElement.getAttribute('aria-label') === 'Actions for {model}'")
    browser.press("Enter")
    browser.until("!!document.querySelector('.menu:popover-open')")
    browser.tab_to(f"document.activeElement.getAttribute('aria-label') === '{item} {model}'")


def test_models_are_unloaded_and_loaded_with_the_keyboard(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui")
    browser.until(f"{cell('plus', 'State')} === 'ready'")
    open_menu(browser, "plus", "Unload")
    browser.press("Enter")
    browser.until("document.querySelector('dialog')?.open")
    browser.press("Escape")
    browser.until("document.activeElement.getAttribute('aria-label') === 'Actions for plus'")
    assert server.ready("plus")
    open_menu(browser, "plus", "Unload")
    browser.press("Enter")
    browser.until("document.activeElement.closest('dialog')?.open")
    browser.press("Enter")
    browser.until(f"{cell('plus', 'State')} === 'unloaded'")
    assert not server.ready("plus")
    browser.until("document.activeElement.getAttribute('aria-label') === 'Actions for plus'")
    browser.evaluate("document.activeElement.blur()")
    open_menu(browser, "plus", "Load")
    browser.press("Enter")
    browser.until(f"{cell('plus', 'State')} === 'ready'")
    assert server.infer("plus", [1.0]) == [2.0]


def test_a_reload_is_confirmed(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/models/plus")
    browser.until("document.querySelector('.head')?.innerText.includes('ready')")
    browser.evaluate("document.querySelector('[aria-label=\"Reload plus\"]').click()")
    browser.until("document.querySelector('dialog[open] h2')?.innerText === 'Reload plus?'")
    browser.press("Escape")
    browser.until("!document.querySelector('dialog')")


def test_a_dialog_closes_with_its_page(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/models/plus")
    browser.until("document.querySelector('.head')?.innerText.includes('ready')")
    browser.evaluate("document.querySelector('[aria-label=\"Unload plus\"]').click()")
    browser.until("!!document.querySelector('dialog[open]')")
    browser.evaluate("location.hash = '#/workers'")
    browser.until("!document.querySelector('dialog') && document.querySelector('h1').innerText === 'Workers'")
    assert server.ready("plus")


def test_only_what_the_control_mode_allows_is_offered(browser: Browser, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "plus", adds(1))
    with serving(tmp_path / "models", tmp_path / "log") as fixed:
        for page in ("", "#/models/plus"):
            browser.open(f"http://{fixed.http}/ui{page}")
            browser.until("!!document.querySelector('[aria-label=\"Actions for plus\"]')")
            browser.until("document.querySelector('main').innerText.includes('ready')")
            browser.evaluate("document.querySelector('[aria-label=\"Actions for plus\"]').click()")
            browser.until("document.querySelector('.menu:popover-open')?.innerText === 'Log'")
        browser.open(f"http://{fixed.http}/ui#/")
        browser.until("document.body.innerText.includes('--model-control-mode=none')")
    browser.complaints.clear()


def test_a_model_is_tried_with_the_keyboard(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/models/plus")
    browser.until("!!document.querySelector('.tryit')")
    browser.tab_to("document.activeElement.getAttribute('aria-label') === 'Shape of INPUT0'")
    browser.evaluate("document.activeElement.select()")
    browser.press(*"[1,2]")
    browser.tab_to("document.activeElement.getAttribute('aria-label') === 'Data of INPUT0'")
    browser.evaluate("document.activeElement.select()")
    browser.press(*"[1,2.5]")
    browser.tab_to("document.activeElement.innerText === 'Run'")
    browser.press("Enter")
    browser.until("document.querySelector('.answer').innerText === 'OUTPUT0 FP32 [1,2]\\n[2,3.5]'")
    browser.evaluate("document.querySelector('.tryit textarea').value = '[1'")
    browser.press("Enter")
    browser.until("document.querySelector('.answer').innerText.startsWith('The data of INPUT0 is not JSON: ')")


def test_a_picture_of_any_size_is_tried_with_a_plausible_one(browser: Browser, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "picture", IDENTITY, pbtxt(dims="3, -1, -1", parameters=IN_PROCESS))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        browser.open(f"http://{server.http}/ui#/models/picture")
        browser.until("!!document.querySelector('.tryit')")
        assert browser.evaluate("document.querySelector('.tryit input').value") == "[1,3,224,224]"
        browser.evaluate("document.querySelector('.tryit form').requestSubmit()")
        browser.until("document.querySelector('.answer').innerText.startsWith('OUTPUT0 FP32 [1,3,224,224]')")


def test_a_stream_is_shown_as_it_comes(models: Path, server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/models/speaker")
    browser.until("!!document.querySelector('.tryit')")
    browser.evaluate("document.querySelector('.tryit textarea').value = 'one wait two'")
    browser.evaluate("document.querySelector('.tryit form').requestSubmit()")
    browser.until("document.querySelector('.answer').textContent === 'OUTPUT0one! wait! '")
    let_go(models / "speaker")
    browser.until("document.querySelector('.answer').textContent === 'OUTPUT0one! wait! two! '")


def test_a_chat_with_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    folder = python_model(tmp_path / "models", "talker", TALKER, TALKS)
    (folder / "1" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
    )
    said = "[...document.querySelectorAll('.chat li')].map((each) => each.lastChild.textContent.trim())"
    with serving(tmp_path / "models", tmp_path / "log") as server:
        browser.open(f"http://{server.http}/ui#/models/talker")
        browser.until("!!document.querySelector('.talk')")
        browser.tab_to("document.activeElement.getAttribute('aria-label') === 'Message'")
        browser.press(*"hi", "Enter")
        browser.until(f"{said}.join('|') === 'hi|u:hi'")
        browser.until("/^First text after .* all after /.test(document.querySelector('.talk [role=status]').innerText)")
        browser.press(*"then wait here", "Enter")
        browser.until(f"{said}.at(-1) === 'u:hi a:u:hi u:then wait'")
        browser.tab_to("document.activeElement.innerText === 'Stop'")
        browser.press("Enter")
        eventually(lambda: "was stopped" in server.text)
        browser.until("document.querySelector('.talk [role=status]').innerText === 'Stopped'")
        browser.evaluate("[...document.querySelectorAll('.talk button')].at(-1).click()")
        assert browser.evaluate(said) == []
        browser.press(*"again", "Enter")
        browser.until(f"{said}.join('|') === 'again|u:again'")
    browser.evaluate("document.querySelector('.talk [aria-label=Message]').value = 'lost'")
    browser.evaluate("document.querySelector('.talk form').requestSubmit()")
    browser.until("document.querySelector('.talk [role=status]').innerText === 'The server does not answer.'")
    assert browser.evaluate("document.querySelector('.talk [aria-label=Message]').value") == "lost"
    assert [each for each in browser.complaints if "Failed to load resource" not in each] == []
    browser.complaints.clear()


def test_a_picture_is_sent_as_it_is(server: Serving, browser: Browser, tmp_path: Path) -> None:
    picture = tmp_path / "red.png"
    Image.new("RGB", (4, 3), (255, 0, 10)).save(picture)
    browser.open(f"http://{server.http}/ui#/models/colour")
    browser.until("document.querySelector('.tryit input[type=file]')?.accept === 'image/*'")
    root = browser.call("DOM.getDocument")["root"]["nodeId"]
    node = browser.call("DOM.querySelector", nodeId=root, selector="input[type=file]")["nodeId"]
    browser.call("DOM.setFileInputFiles", nodeId=node, files=[str(picture)])
    browser.evaluate("document.querySelector('.tryit form').requestSubmit()")
    browser.until("document.querySelector('.answer').innerText.includes('[255,0,10]')")


def test_an_ensemble_is_drawn(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/models/twice")
    browser.until("document.querySelectorAll('.graph a').length === 2")
    tensors = "[...document.querySelectorAll('.graph .tensor')].map((text) => text.firstChild.data).join(' ')"
    assert browser.evaluate(tensors) == "INPUT0 between OUTPUT0"
    server.infer("twice", [1.0])
    browser.until("/^[\\d.]+ (µs|ms|s) on average$/.test(document.querySelector('.graph .time').textContent)")
    browser.tab_to("!!document.activeElement.closest('.graph')")
    browser.press("Enter")
    browser.until("document.querySelector('h1').innerText === 'plus'")


def test_settings_are_changed(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/settings")
    browser.until("!!document.querySelector('[name=log_info]') && !!document.querySelector('[name=trace_level]')")
    browser.tab_to("document.activeElement.name === 'log_info'")
    browser.press(" ")
    browser.tab_to("document.activeElement.innerText === 'Save'")
    browser.press("Enter")
    browser.until("document.querySelector('.bar').innerText.includes('Saved')")
    assert server.json("GET", "/v2/logging")["log_info"] is False
    browser.tab_to("document.activeElement.name === 'trace_rate'")
    browser.evaluate("document.activeElement.value = 'often'")
    browser.press("Enter")
    browser.until(
        "document.querySelectorAll('.bar')[1].innerText.includes(\"Unable to parse 'trace_rate', got: often\")"
    )
    assert [each for each in browser.complaints if "400" not in each] == []
    browser.complaints.clear()


LISTED = "[...document.querySelectorAll('.list tbody tr')].map((row) => row.innerText.replaceAll('\\t', ' '))"


def test_workers_are_shown_one_by_one(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/workers")
    browser.until("document.querySelectorAll('.list tbody tr').length === 4")
    (row,) = [row for row in browser.evaluate(LISTED) if row.startswith("plus_0_0 ")]
    pid = server.workers()["plus_0_0"]
    assert re.fullmatch(rf"plus_0_0 1 idle\s+{pid} [\d.]+ MiB 0 [\d a-z]+", row), row
    os.kill(pid, signal.SIGKILL)
    browser.until(f"{LISTED}.some((row) => row.startsWith('plus_0_0 ') && / [1-9]\\d* [^ ]+ s$/.test(row))")
    (row,) = [row for row in browser.evaluate(LISTED) if row.startswith("plus_0_0 ")]
    assert str(pid) not in row
    assert browser.evaluate(LISTED)[0] == row, "what was restarted most often is on top"
    browser.tab_to("document.activeElement.type === 'search'")
    browser.press(*"speak")
    assert [row.split()[0] for row in browser.evaluate(LISTED)] == ["speaker_0_0"]


def test_the_instances_need_the_key_of_statistics(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", *ON_DEMAND, "--http-restricted-api=statistics:X-A=a") as server:
        assert server.ask("GET", "/ui/instances")[0] == 403
        status, headers, body = server.ask("GET", "/ui/instances", X_A="a")
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        found = {each["instance"]: each for each in json.loads(body)}
        assert found["plus_0_0"].pop("since") <= time.time()
        assert found["plus_0_0"].pop("memory") > 1_000_000
        pid = server.workers()["plus_0_0"]
        told = {"model": "plus", "version": "1", "instance": "plus_0_0", "usable": True, "busy": False, "reason": ""}
        assert found["plus_0_0"] == {**told, "pid": pid, "restarts": 0}


def test_what_tenants_use(models: Path, browser: Browser, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[tenants.acme]\nkeys = ["a"]\nrequests_per_minute = 2\nconcurrency = 7\n')
    with serving(models, tmp_path / "log", *ON_DEMAND, f"--policy-file={policy}", ALL_TENANTS) as server:
        body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        assert server.ask("POST", "/v2/models/plus/infer", body, Authorization="Bearer a")[0] == 200
        browser.open(f"http://{server.http}/ui")
        browser.until("document.querySelector('dialog[open] code')?.innerText === 'x-admin-key'")
        browser.press(*"tests", "Enter")
        browser.until("document.querySelector('header [href=\"#/tenants\"]')?.hidden === false")
        browser.tab_to("document.activeElement.innerText === 'Tenants'")
        browser.press("Enter")
        browser.until(f"{LISTED}.some((row) => row.startsWith('acme requests per minute 2 2 1'))")
        assert "acme 0 7 " in "\n".join(browser.evaluate(LISTED))
        assert any(re.fullmatch(r"acme \w+ plus 1 1 0 \d+ B .*", row) for row in browser.evaluate(LISTED))
    browser.complaints.clear()


def test_what_the_figures_of_tenants_need(models: Path, browser: Browser, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[tenants.acme]\nkeys = ["a"]\n')
    with serving(models, tmp_path / "log", *ON_DEMAND, f"--policy-file={policy}") as server:
        for page in ("tenants", "usage"):
            browser.open(f"http://{server.http}/ui#/{page}")
            browser.until("document.body?.innerText.includes('--http-restricted-api=statistics:admin-key=@FILE')")
            assert browser.evaluate(f"document.querySelector('header [href=\"#/{page}\"]').hidden") is False
    browser.complaints.clear()


def test_what_a_ledger_has(models: Path, browser: Browser, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", *ON_DEMAND, f"--ledger={tmp_path / 'ledger.db'}") as server:
        body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        assert server.ask("POST", "/v2/models/plus/infer", body)[0] == 200
        browser.open(f"http://{server.http}/ui")
        browser.until("document.querySelector('header [href=\"#/usage\"]')?.hidden === false")
        browser.tab_to("document.activeElement.innerText === 'Usage'")
        browser.press("Enter")
        browser.until(f"{LISTED}.some((row) => row.startsWith('everybody plus 1 0 0 0 '))")
        assert any(row.startswith("answered 1 0 0 0 ") for row in browser.evaluate(LISTED))
    browser.complaints.clear()


def test_there_are_no_tenants_without_a_policy(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui")
    browser.until(f"{cell('plus', 'State')} !== undefined")
    assert "Tenants" not in browser.text
    assert "Usage" not in browser.text


def test_batches(models: Path, browser: Browser, tmp_path: Path) -> None:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    url = "/v2/models/plus/infer"
    item = json.dumps({"custom_id": "1", "url": url, "body": {"inputs": [tensor]}})
    (tmp_path / "in.jsonl").write_text(item)
    with serving(models, tmp_path / "log", *ON_DEMAND, f"--batches={tmp_path / 'batches.db'}") as server:
        out = tmp_path / "out.jsonl"
        run([str(NERITE), "batch", "run", str(tmp_path / "in.jsonl"), "-o", str(out), "--url", server.http], server)
        browser.open(f"http://{server.http}/ui")
        browser.until("document.querySelector('header [href=\"#/batches\"]')?.hidden === false")
        browser.tab_to("document.activeElement.innerText === 'Batches'")
        browser.press("Enter")
        browser.until(f"{LISTED}.some((row) => /^batch_[0-9a-f]+ completed\\s+plus 1 0 1 /.test(row))")
    browser.complaints.clear()


def test_the_traces_of_one_model_are_set(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/models/held")
    browser.until("document.querySelectorAll('details').length === 2")
    browser.tab_to("document.activeElement.innerText === 'Traces'")
    browser.press("Enter")
    browser.until("!!document.querySelector('[name=trace_rate]')")
    browser.tab_to("document.activeElement.name === 'trace_rate'")
    browser.evaluate("document.activeElement.value = '77'")
    browser.press("Enter")
    browser.until("document.querySelector('details .bar').innerText.includes('Saved')")
    assert server.json("GET", "/v2/models/held/trace/setting")["trace_rate"] == "77"
    assert server.json("GET", "/v2/models/plus/trace/setting")["trace_rate"] != "77"


def test_what_the_server_refuses_is_said(models: Path, browser: Browser, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log") as server:
        browser.open(f"http://{server.http}/ui#/models/plus")
        browser.until("!!document.querySelector('[aria-label=\"Reload plus\"]')")
        browser.evaluate("document.querySelector('[aria-label=\"Reload plus\"]').click()")
        browser.until("!!document.querySelector('dialog[open]')")
        browser.press("Enter")
        browser.until(
            "document.getElementById('notice').innerText.includes('explicit model load / unload is not allowed')"
        )
    browser.until("document.getElementById('pulse').innerText === 'No connection'")
    assert [each for each in browser.complaints if "Failed to load resource" not in each] == []
    browser.complaints.clear()


def test_a_queue_is_seen(models: Path, server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui")
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(server.infer, "held", [-1.0])]
        # The others are not in its batch.
        eventually(lambda: any(each["busy"] for each in server.json("GET", "/ui/instances")))
        asked += [pool.submit(server.infer, "held", [-1.0]) for _ in range(2)]
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
                "|| document.querySelector('dialog[open] p').innerText.includes('rejected the key')"
            )
        browser.until("document.querySelector('dialog[open] p')?.innerText.includes('rejected the key')")
        browser.press(*"sesame", "Enter")
        browser.until(f"Number({cell('plus', 'Requests/s')}) >= 0")
        assert [each for each in browser.complaints if "403" not in each and "401" not in each] == []
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
            for path in ("/ui/metrics", "/ui/history"):
                status, _, body = server.ask("GET", path, **keys)
                assert (status, f"expecting header '{header}'".encode() in body) == (403, True)
            keys[header] = value
        status, headers, body = server.ask("GET", "/ui/metrics", **keys)
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert b'nv_inference_request_success{model="plus",version="1"} 0' in body
        assert server.ask("GET", "/ui/history", **keys)[0] == 200


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
        paths = ("/ui", "/ui/console.js", "/ui/metrics", "/ui/history", "/ui/log")
        assert [server.ask("GET", path)[0] for path in paths] == [404] * 5
        assert "Web console" not in server.text
    with serving(models, tmp_path / "another log", *ON_DEMAND) as server:
        eventually(lambda: f"Web console: http://127.0.0.1:{server.ports['HTTPService']}/ui" in server.text)


def test_without_metrics_the_page_says_why_it_has_no_numbers(models: Path, browser: Browser, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", *ON_DEMAND, "--allow-metrics=false") as server:
        browser.open(f"http://{server.http}/ui")
        browser.until(f"{cell('plus', 'State')} === 'ready'")
        browser.until("document.getElementById('notice').innerText.includes('--allow-metrics=false')")
        assert browser.evaluate(cell("plus", "Requests/s")) == "\N{EN DASH}"
    browser.complaints.clear()
