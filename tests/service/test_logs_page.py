"""The page about logs and traces says what the server does."""

from __future__ import annotations

import contextvars
import re
import threading
from pathlib import Path

from doubles import request
from nerite.core.request import at_hand, current_request_ids
from serving import IDENTITY, eventually, python_model, serving

PAGE = (Path(__file__).parents[2] / "docs" / "logs.md").read_text()


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return found


def test_the_access_log(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "m", IDENTITY)
    with serving(tmp_path / "models", tmp_path / "log", "--access-log", "true") as server:
        body = {"id": "me", "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        server.ask("POST", "/v2/models/m/infer", body)
        eventually(lambda: "request id: me" in server.text)
    (access,) = [block for block in blocks("text") if "access_log.py" in block]
    form = re.sub(r"[\d.:]+", "#", access.splitlines()[0])
    assert form in {re.sub(r"[\d.:]+", "#", line) for line in server.text.splitlines()}


def test_a_thread_that_knows_its_request() -> None:
    told = []
    before = at_hand.set([request(id="me")])
    names = {
        "contextvars": contextvars,
        "threading": threading,
        "request": request(),
        "work": lambda _: told.append(current_request_ids()),
    }
    exec(compile(blocks("python")[0], "docs/logs.md", "exec"), names)
    at_hand.reset(before)
    eventually(lambda: bool(told))
    assert told == ["me"]
