"""Input files of batches: every mistake with its line. Lines of output files."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from nerite.batches import items
from nerite.batches.items import ItemLine, answer_line, body_of_line, error_line, is_endpoint, read_items
from nerite.core.errors import InvalidArgument

CHAT = "/v1/chat/completions"


def line(number: int = 1, url: str = CHAT, **changes: Any) -> dict[str, Any]:
    return {"custom_id": f"item-{number}", "method": "POST", "url": url, "body": {"model": "llm"}, **changes}


def found(*lines: Any, endpoint: str = "") -> items.ItemFile:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return read_items(io.BytesIO(text.encode()), endpoint)


def test_a_file_without_mistakes() -> None:
    lines = [json.dumps(line(number)).encode() + b"\n" for number in (1, 2)]
    raw = lines[0] + b"\n" + lines[1].strip()
    read = read_items(io.BytesIO(raw), CHAT)
    assert (read.mistakes, read.model) == ([], "llm")
    assert [(each.line, each.custom_id) for each in read.items] == [(1, "item-1"), (3, "item-2")]
    for each in read.items:
        assert json.loads(raw[each.position : each.position + each.size])["custom_id"] == each.custom_id


def test_a_model_of_kserve_is_in_the_url() -> None:
    url = "/v2/models/adder/infer"
    read = found(line(1, url, body={"inputs": []}), endpoint=url)
    assert (read.mistakes, read.model) == ([], "adder")


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[1]", "invalid_json_line", None),
        (line(2, colour="red"), "unknown_parameter", "colour"),
        (line(2, custom_id=None), "missing_required_parameter", "custom_id"),
        (line(2, body=None), "missing_required_parameter", "body"),
        (line(2, custom_id=7), "invalid_custom_id", "custom_id"),
        (line(2, custom_id=""), "invalid_custom_id", "custom_id"),
        (line(2, custom_id="x" * 1025), "invalid_custom_id", "custom_id"),
        (line(2, custom_id="a\0b"), "invalid_custom_id", "custom_id"),
        (line(2, "/v2/models/zz ABC/infer"), "invalid_url", "url"),
        (line(2, "/v2/models/zz\r\nX-Injected: 1/infer"), "invalid_url", "url"),
        (line(2, "/v2/models/m?x=/infer"), "invalid_url", "url"),
        (line(2, "/v2/models/../infer"), "invalid_url", "url"),
        (line(2, "/v2/models/a%2Fb/infer"), "invalid_url", "url"),
        (line(2, "/v2/models/a%00/infer"), "invalid_url", "url"),
        (line(2, "/v2/models/é/infer"), "invalid_url", "url"),
        (line(2, "/v2/models/m/infer\n"), "invalid_url", "url"),
        (line(2, method="GET"), "invalid_method", "method"),
        (line(2, "/v1/models"), "invalid_url", "url"),
        (line(2, "/v1/completions"), "mismatched_endpoint", "url"),
        (line(2, body=[]), "invalid_request", "body"),
        (line(2, body={"model": "llm", "stream": True}), "invalid_request", "body.stream"),
        (line(2, body={}), "missing_required_parameter", "body.model"),
        (line(2, body={"model": "other"}), "mismatched_model", "body.model"),
        (line(2, body={"model": "l\nlm"}), "missing_required_parameter", "body.model"),
        (line(1), "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_mistake_has_its_line(wrong: Any, code: str, param: str | None) -> None:
    (mistake,) = found(line(1), wrong, line(3)).mistakes
    assert (mistake.code, mistake.line, mistake.param) == (code, 2, param)
    assert mistake.text.startswith("Line 2: ")


def test_items_go_where_the_batch_says() -> None:
    (mistake,) = found(line(1), endpoint="/v1/completions").mistakes
    assert mistake.code == "mismatched_endpoint"


def test_a_file_without_items_is_a_mistake() -> None:
    (mistake,) = found("", " ").mistakes
    assert (mistake.code, mistake.line) == ("empty_file", None)


def test_a_file_with_too_many_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "MAX_ITEMS", 2)
    (mistake,) = found(*map(line, range(1, 9))).mistakes
    assert (mistake.code, mistake.line) == ("too_many_tasks", 3)


def test_a_line_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "MAX_LINE", 100)
    (mistake,) = found(line(1, body={"model": "m" * 200})).mistakes
    assert (mistake.code, mistake.line) == ("invalid_json_line", 1)


def test_not_every_mistake_of_a_file_is_listed() -> None:
    assert len(found(*["{"] * 500).mistakes) == 50


def test_endpoints() -> None:
    assert is_endpoint("/v1/embeddings")
    assert is_endpoint("/v2/models/m/versions/3/infer")
    assert is_endpoint("/v2/models/caf%C3%A9/infer")
    assert not is_endpoint("/v2/models/m/generate")
    assert not is_endpoint("/v1/files")


def test_the_body_of_a_line() -> None:
    raw = json.dumps(line(1, body={"model": "é", "n": 1})).encode()
    item = ItemLine(1, "item-1", 0, len(raw))
    assert json.loads(body_of_line(raw, item)) == {"model": "é", "n": 1}
    other = json.dumps(line(2, body={"model": "é", "n": 1})).encode()
    for damaged in (b"", raw[:-1], other, bytes(len(raw))):
        with pytest.raises(InvalidArgument, match="the item is not in line 1 any more"):
            body_of_line(damaged, item)


def test_a_member_that_occurs_twice_has_the_value_that_was_checked() -> None:
    raw = b'{"custom_id":"a","url":"/v1/completions","body":{"model":"checked","model":"last"}}'
    (item,) = read_items(io.BytesIO(raw)).items
    assert body_of_line(raw, item) == b'{"model":"last"}'


@pytest.mark.parametrize("levels", [99, 100, 253, 300, 1020, 5000])
def test_what_is_accepted_can_be_loaded(levels: int) -> None:
    body = b'{"model":"m","deep":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"
    raw = b'{"custom_id":"a","url":"/v1/completions","body":' + body + b"}"
    read = read_items(io.BytesIO(raw))
    if levels <= items.MAX_DEPTH:
        assert json.loads(body_of_line(raw, read.items[0])) == json.loads(body)
    else:
        assert read.mistakes and not read.items


def test_a_line_that_would_take_long_to_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "MAX_VALUES", 1000)
    assert not found(line(1, body={"model": "m", "a": [1] * 900})).mistakes
    for body in ([1] * 1100, [[]] * 100):
        (mistake,) = found(line(1, body={"model": "m", "a": body})).mistakes
        assert (mistake.code, mistake.line) == ("invalid_json_line", 1)


def test_lines_of_outputs() -> None:
    done = json.loads(answer_line("batch_req_1", "item-1", 200, "cmpl-7", b'{"choices":[]}'))
    assert done == {
        "id": "batch_req_1",
        "custom_id": "item-1",
        "response": {"status_code": 200, "request_id": "cmpl-7", "body": {"choices": []}},
        "error": None,
    }
    text = answer_line("batch_req_1", "item-1", 500, "", b"no\nJSON")
    assert b"\n" not in text
    assert json.loads(text)["response"]["body"] == {"text": "no\nJSON"}
    lost = json.loads(error_line("batch_req_2", "item-2", *items.EXPIRED))
    assert lost["response"] is None
    assert lost["error"]["code"] == "batch_expired"


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_files_of_other_editors(ends: str) -> None:
    """With a byte order mark, ends of lines of two bytes, empty lines, and none at the end."""
    lines = [json.dumps(line(1)), "", " ", json.dumps(line(2))]
    raw = b"\xef\xbb\xbf" + ends.join(lines).encode()
    read = read_items(io.BytesIO(raw), CHAT)
    assert read.mistakes == []
    assert [each.line for each in read.items] == [1, 4]
    for each in read.items:
        body = body_of_line(raw[each.position : each.position + each.size], each)
        assert json.loads(body) == {"model": "llm"}
    (mistake,) = read_items(io.BytesIO(b"\xef\xbb\xbf")).mistakes
    assert mistake.code == "empty_file"


def test_an_answer_of_several_lines_stays_json() -> None:
    text = answer_line("batch_req_1", "item-1", 200, "", b'{\r\n  "text": "a\\nb",\n  "n": 12345678901234567890123\n}')
    assert b"\n" not in text
    assert json.loads(text)["response"]["body"] == {"text": "a\nb", "n": 12345678901234567890123}


@pytest.mark.parametrize(
    "url",
    [
        "/v2/models/zz ABC\r\nX-Nerite-Tenant: bob\r\nX-Injected: 1\r\n\r\n/infer",
        "/v2/models/a b/infer",
        "/v2/models/a?b/infer",
        "/v2/models/a#b/infer",
        "/v2/models/a%2fb/infer",
        "/v2/models/a\u2028b/infer",
        "/v2/models/a\0b/infer",
        "/v2/models/ä/infer",
    ],
)
def test_a_url_has_nothing_that_means_something_else_on_the_wire(url: str) -> None:
    assert not is_endpoint(url)
    line = json.dumps({"custom_id": "a", "url": url, "body": {}}).encode()
    assert read_items(io.BytesIO(line)).mistakes[0].code == "invalid_url"
