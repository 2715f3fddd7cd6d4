"""Requests come back from a helper process as they were read, whatever their endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nerite.llm.openai.bodies import READERS, as_json, read_in_helper
from nerite.llm.openai.chat_requests import ChatRequest
from nerite.llm.openai.responses.request import ResponseCall

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"model": "m", "prompt": ["a", "b"], "n": 2, "temperature": 0.5, "odd": 1},
    "chat_completions": {"model": "m", "messages": MESSAGES, "tools": [TOOL], "stop": ["x"]},
    "responses": {"model": "m", "input": "a", "store": False, "tools": [{"type": "custom", "name": "c"}]},
    "messages": {"model": "m", "messages": MESSAGES, "max_tokens": 4},
    "count_tokens": {"model": "m", "messages": MESSAGES},
    "tokenize": {"model": "m", "messages": MESSAGES},
    "detokenize": {"model": "m", "tokens": [1, 2]},
    "embeddings": {"model": "m", "input": ["a", "b"], "dimensions": 2, "encoding_format": "base64"},
    "rerank": {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "odd": 1},
    "score": {"model": "m", "text_1": ["a", "b"], "text_2": ["c", "d"], "user": "u"},
    "classify": {"model": "m", "input": "a"},
    "classify_texts": {"model": "m", "input": ["a"]},
    "images": {"model": "m", "prompt": "a", "size": "64x32", "guidance_scale": 2.5},
    "speech": {"model": "m", "input": "a", "voice": "v", "speed": 2},
}


def plain(value: Any) -> Any:
    """Return a request without what may differ: views and bytes, tuples and lists, JSON and objects."""
    if isinstance(value, ResponseCall):
        return plain([*value._replace(chat=None), value.chat])  # type: ignore[arg-type]
    if isinstance(value, ChatRequest):
        return plain([*value._replace(given={}), json.loads(bytes(as_json(value.given)))])
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def returned(endpoint: str, body: dict[str, Any]) -> Any:
    """Return what a helper process returns: bytes as they are, and all else as JSON."""
    values = read_in_helper(endpoint, memoryview(json.dumps(body).encode()))
    return [memoryview(each) if isinstance(each, bytes) else json.loads(json.dumps(each)) for each in values]


@pytest.mark.parametrize("endpoint", BODIES)
def test_requests(endpoint: str) -> None:
    reader = READERS[endpoint]
    read = reader.read(json.dumps(BODIES[endpoint]).encode())
    assert plain(reader.rebuilt(*returned(endpoint, BODIES[endpoint]))) == plain(read)


def test_a_refusal() -> None:
    (found,) = returned("speech", {"model": "m", "input": ""})
    assert found["refused"][1:] == ["input", "invalid_value", 400]


def test_every_endpoint_with_a_body_is_here() -> None:
    assert READERS.keys() - BODIES.keys() == {"transcriptions", "translations"}, "their bodies are forms"
