"""The chat of the console: its settings, its choice of models, and Markdown that is never markup."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from browser import Browser, browsing
from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving

TALKER = """
def execute(self, requests):
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().flat[0].decode()
        sender = request.get_response_sender()
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([[part]], object))]))
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
EMBEDS = """
backend: "python"
max_batch_size: 4
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "embedding" data_type: TYPE_FP32 dims: [ 4 ] }]
instance_group [{ kind: KIND_CPU }]
"""
EMBEDDER = """
def execute(self, requests):
    return [pb_utils.InferenceResponse([pb_utils.Tensor("embedding", np.zeros((1, 4), np.float32))]) for _ in requests]
"""
HOSTILE = """\
# A <b>heading</b>

<img src=x onerror="window.broken = true"><script>window.broken = true</script>

[run](javascript:window.broken=true) [data](data:text/html,<script>window.broken=true</script>) ![picture](https://example.test/a.png)
[relative](/v2/repository/models/a/unload)
[good](https://example.test/page?a=1)

- `<i>code</i>` and **<u>bold</u>**
- item
  1. inner

| a | <b>b</b> |
|---|---|
| 1 | [x](vbscript:x) |

```html" onclick="window.broken = true
<iframe src="javascript:window.broken = true"></iframe>
```

> quoted <svg onload="window.broken = true">
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("talks")
    models = folder / "models"
    talker = python_model(models, "talker", TALKER, TALKS)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    (talker / "1" / "chat_template.jinja").write_text(template)
    python_model(models, "a-embedder", EMBEDDER, EMBEDS)
    python_model(models, "a-picture", IDENTITY, pbtxt(0, "", "TYPE_UINT8", "-1, -1, 3"))
    with serving(models, folder / "log") as running:
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
    yield running_browser
    assert running_browser.complaints == []


STATUS = "document.querySelector('.talk > form > .bar [role=status]').innerText"
MESSAGE = "document.querySelector('.talk textarea[aria-label=Message]')"
SAID = "[...document.querySelectorAll('.chat > li')].at(-1)?.lastChild.innerText"


def test_a_language_model_is_chosen_at_the_start(server: Serving, browser: Browser) -> None:
    assert {each["id"] for each in server.json("GET", "/v1/models")["data"]} == {"a-embedder", "talker"}
    eventually(lambda: "Try it: curl" in server.text)
    (line,) = [line for line in server.text.splitlines() if "Try it: " in line]
    assert "/v1/chat/completions" in line and "talker" in line
    browser.open(f"http://{server.http}/ui")
    browser.until("document.querySelector('header [href=\"#/chat\"]')?.hidden === false")
    browser.evaluate("document.querySelector('header [href=\"#/chat\"]').click()")
    browser.until("!!document.querySelector('.talk')")
    names = "[...document.querySelector('[name=model]').options].map((option) => option.value)"
    assert browser.evaluate(names) == ["talker"]


def test_the_settings_of_a_chat(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/chat")
    browser.until("!!document.querySelector('.talk')")
    browser.evaluate("document.querySelector('.knobs summary').click()")
    for name, value in (("system", "Be brief."), ("temperature", "0.25"), ("max_tokens", "77")):
        browser.tab_to(f"document.activeElement.name === '{name}'")
        browser.press(*value)
    browser.evaluate(
        "window.sent = []; window.real = fetch; window.fetch = (url, how) => (sent.push(how), real(url, how))"
    )
    browser.tab_to("document.activeElement.getAttribute('aria-label') === 'Message'")
    browser.press(*"hi", "Enter")
    browser.until(f"{SAID} === 's:Be brief.\\nu:hi'")
    asked = json.loads(browser.evaluate("sent.map(({ body }) => body).filter(Boolean).at(-1)"))
    assert (asked["temperature"], asked["max_tokens"]) == (0.25, 77)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    browser.until(
        "document.querySelector('.talk > form > .bar [role=status]').innerText.startsWith('First text after ')"
    )
    browser.call("Page.reload")
    browser.until("document.querySelector('[name=temperature]')?.value === '0.25'")
    browser.evaluate("document.querySelector('[name=temperature]').value = '9'")
    browser.evaluate(f"{MESSAGE}.value = 'no'")
    browser.evaluate("document.querySelector('.talk form').requestSubmit()")
    assert browser.evaluate("document.querySelectorAll('.chat > li').length") == 0
    browser.evaluate("sessionStorage.clear()")


def test_tokens_a_second(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/chat")
    browser.until("!!document.querySelector('.talk')")
    events = [
        {"choices": [{"delta": {"content": "one"}}]},
        {"choices": [{"delta": {"content": " two"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 40}},
    ]
    parts = json.dumps([f"data: {json.dumps(each)}\n\n" for each in events])
    stream = (
        f"new ReadableStream({{ async start(out) {{ for (const part of {parts}) {{ "
        "out.enqueue(new TextEncoder().encode(part)); "
        "await new Promise((done) => setTimeout(done, 50)); } out.close(); } })"
    )
    browser.evaluate(f"window.fetch = async () => new Response({stream})")
    browser.evaluate(f"{MESSAGE}.value = 'count'")
    browser.evaluate("document.querySelector('.talk form').requestSubmit()")
    status = browser.until(f"/^First .*tokens.*/.exec({STATUS})?.[0]")
    assert ", 40 tokens, " in status and status.endswith(" tokens/s, cut off at the maximum of tokens")
    rate = float(status.rpartition(" tokens/s")[0].rpartition(" ")[2])
    assert 39 / 5 < rate < 39 / 0.09


def test_a_hostile_answer_is_text(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui#/chat")
    browser.until("!!document.querySelector('.talk')")
    browser.evaluate(f"{MESSAGE}.value = {json.dumps(HOSTILE)}")
    browser.evaluate("document.querySelector('.talk form').requestSubmit()")
    browser.until(f"{STATUS}.startsWith('First text')")
    last = "[...document.querySelectorAll('.chat > li')].at(-1).lastChild"
    assert browser.evaluate(f"{last}.querySelectorAll('img, script, iframe, svg, [onclick], [onload]').length") == 0
    assert browser.evaluate(f"[...{last}.querySelectorAll('a')].map((each) => each.href)") == [
        "https://example.test/a.png",
        "https://example.test/page?a=1",
    ]
    assert browser.evaluate(f"{last}.querySelector('a').rel") == "noopener noreferrer nofollow"
    text = browser.evaluate(f"{last}.innerText")
    assert "<img src=x onerror=" in text and "[run](javascript:window.broken=true)" in text
    assert "<iframe src=" in browser.evaluate(f"{last}.querySelector('pre').innerText")
    assert browser.evaluate("window.broken") is None


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("**a** *b* ~~c~~ `d*e*`", "<p><strong>a</strong> <em>b</em> <s>c</s> <code>d*e*</code></p>"),
        ("2 * 3 * 4, a_b_c, f(*args)", "<p>2 * 3 * 4, a_b_c, f(*args)</p>"),
        ("- a\n- b\n  - c\n\nend", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>end</p>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("### a #\n---", "<h6>a</h6><hr>"),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        (
            "```py\na = *b*\n\n```\nend",
            '<pre tabindex="0" aria-label="Code, py"><code>a = *b*\n</code></pre><p>end</p>',
        ),
        ("```\nnot closed", '<pre tabindex="0" aria-label="Code"><code>not closed</code></pre>'),
        ("<b>&amp;</b>", "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>"),
    ],
)
def test_markdown(server: Serving, browser: Browser, text: str, made: str) -> None:
    browser.open(f"http://{server.http}/ui")
    browser.until("document.readyState === 'complete'")
    script = (
        "import('/ui/markdown.js').then(({ markdown }) => { const place = document.createElement('div'); "
        f"place.append(...markdown({json.dumps(text)})); return place.innerHTML; }})"
    )
    assert browser.evaluate(script) == made


def test_long_answers_take_no_time(server: Serving, browser: Browser) -> None:
    browser.open(f"http://{server.http}/ui")
    browser.until("document.readyState === 'complete'")
    for piece in ("`", "*", "**a", "[", "[](", "> ", "- ", "  - a\n", "|", "~~~", "http://"):
        script = (
            f"import('/ui/markdown.js').then(({{ markdown }}) => markdown({json.dumps(piece)}.repeat(20000)).length)"
        )
        assert browser.evaluate(script) >= 1
