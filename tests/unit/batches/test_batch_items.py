"""Input files of batches: every mistake with its line. Lines of output files."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from nerite.batches import items
from nerite.batches.items import answer_line, body_of_line, error_line, is_endpoint, read_items

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
        (line(2, method="GET"), "invalid_method", "method"),
        (line(2, "/v1/models"), "invalid_url", "url"),
        (line(2, "/v1/completions"), "mismatched_endpoint", "url"),
        (line(2, body=[]), "invalid_request", "body"),
        (line(2, body={"model": "llm", "stream": True}), "invalid_request", "body.stream"),
        (line(2, body={}), "missing_required_parameter", "body.model"),
        (line(2, body={"model": "other"}), "mismatched_model", "body.model"),
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
    assert not is_endpoint("/v2/models/m/generate")
    assert not is_endpoint("/v1/files")


def test_the_body_of_a_line() -> None:
    raw = json.dumps(line(1, body={"model": "é", "n": 1})).encode()
    assert json.loads(body_of_line(raw)) == {"model": "é", "n": 1}


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
        assert json.loads(body_of_line(raw[each.position : each.position + each.size])) == {"model": "llm"}
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
