"""Libraries that agents in JavaScript are written with: OpenAI's own, and Vercel's, over two APIs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_client_libraries import server as server

from serving import Serving

FOLDER = Path(__file__).parent / "javascript"
CALLED = [["look", {"at": "sky"}]]
STEPS = [2, "tool-calls", CALLED, ["sky is blue"]]


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Any:
    """What the program has to say about each library."""
    if not os.environ.get("EXAM_CLIENTS") and not (FOLDER / "node_modules" / "ai").exists():
        pytest.skip("make exam-clients installs the packages")
    server: Serving = request.getfixturevalue("server")
    ran = subprocess.run(
        ["node", FOLDER / "libraries.mjs", f"http://{server.http}/v1"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_openai(told: Any) -> None:
    assert told["openai"]["tools"] == [["tool_calls", CALLED]] * 2
    assert told["openai"]["forms"] == [{"at": "sky"}] * 2
    assert told["openai"]["responses"] == ["The sky is blue.", "The sky is blue.", "completed", 4]


def test_vercel(told: Any) -> None:
    chats = told["chats"]
    assert chats["text"] == ["The sky is blue.", "stop", "The sky is blue.", True]
    assert chats["thoughts"] == ["Let me see.", "Blue."]
    assert chats["tools"] == [STEPS, STEPS]
    assert (chats["form"], chats["vector"]) == ({"at": "sky"}, [1, 2, 3, 4])
    assert chats["refusal"] == [404, "Unknown model: nobody", False]


def test_vercel_over_the_api_of_anthropic(told: Any) -> None:
    assert told["messages"]["text"] == ["The sky is blue.", "stop", "The sky is blue.", True]
    assert told["messages"]["tools"] == [STEPS, STEPS]
