"""``nerite.client`` and ``nerite client`` get the same from a real Triton as from Nerite."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from conformance.exchange import Scene
from conformance.servers import start_nerite, start_triton
from conformance.triton_installation import TritonUnavailable, installation
from forked_programs import NERITE
from nerite.client import Client, ClientError
from serving import PATIENCE, eventually
from tools import unavailable

SCENE = Scene(
    "own-client",
    repository="streams",
    flags=("--model-control-mode=explicit", "--load-model=many", "--load-model=prompt"),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Where a Triton and a Nerite are, in the same state."""
    try:
        installation()
    except TritonUnavailable as reason:
        unavailable(f"Triton cannot run here: {reason}")
    with ExitStack() as running:
        servers = [start(SCENE, tmp_path_factory.mktemp("own_client")) for start in (start_triton, start_nerite)]
        for server in servers:
            running.callback(server.stop)
        for server in servers:
            server.wait()
        yield [f"127.0.0.1:{server.http}" for server in servers]


def answer(call: Callable[[Client], Any], client: Client) -> object:
    """Return what a call brings, or its error, as something to compare."""
    try:
        return call(client)
    except ClientError as error:
        return error.status, str(error).partition("\n")[0]


def unloaded(client: Client, name: str) -> None:
    client.unload(name)
    eventually(lambda: "UNAVAILABLE" in [entry.state for entry in client.models() if entry.name == name])


def plain(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return outputs as something to compare."""
    return {name: (str(array.dtype), array.tolist()) for name, array in outputs.items()}


CALLS: dict[str, Callable[[Client], Any]] = {
    "live": lambda client: client.live(),
    "ready": lambda client: [client.ready(), client.ready("prompt"), client.ready("prompt", "1"), client.ready("one")],
    "models": lambda client: [(entry.name, entry.version, entry.state) for entry in client.models()],
    "model": lambda client: client.model("prompt"),
    "unknown model": lambda client: client.model("nobody"),
    "config": lambda client: client.config("prompt")["input"],
    "infer": lambda client: plain(
        client.infer("prompt", {"text": "z\u00fcrich", "numbers": [1, 2], "half": 0.1, "flag": True}, outputs=["said"])
    ),
    "arrays": lambda client: plain(
        client.infer("prompt", {"text": [["a"], [b"b"]], "grid": np.ones((2, 2, 3))}, parameters={"a": 1})
    ),
    "refused": lambda client: client.infer("prompt", {}),
    "stream": lambda client: list(client.stream("many", {"KIND": "send send last"})),
    "stream that fails": lambda client: list(client.stream("many", {"KIND": "send raise"})),
    "load": lambda client: [client.load("one"), plain(client.infer("one", {"KIND": "return"}))],
    "load nobody": lambda client: client.load("nobody"),
    "unload": lambda client: unloaded(client, "one"),
    "statistics": lambda client: [
        (entry.name, entry.requests, entry.mean_batch) for entry in client.statistics("many")
    ],
    "unknown statistics": lambda client: client.statistics("nobody"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(both: Sequence[str], name: str) -> None:
    answers = []
    for url in both:
        with Client(url, timeout=30) as client:
            answers.append(answer(CALLS[name], client))
    assert answers[0] == answers[1]


COMMANDS = (
    "ls",
    "infer prompt text=hello",
    "infer prompt text=hello numbers=[1,2,3] --output said --parameter a=1 --json",
    "infer prompt",
    "infer many KIND=send",
    "infer many --stream",
    "infer nobody",
    "load one",
    "infer one KIND=return",
    "unload one",
    "load nobody",
    "stats nobody",
    "watch --interval 0.01 --count 1",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(both: Sequence[str], command: str) -> None:
    told = []
    for url in both:
        words = [str(NERITE), "client", "--url", url, *command.split()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
        error = done.stderr.replace(url, "URL").partition("\n")[0]
        told.append((done.returncode, re.sub(r"\d\d:\d\d:\d\d", "TIME", done.stdout), error))
    assert told[0] == told[1]


def test_statistics_have_the_same_form(both: Sequence[str]) -> None:
    forms = []
    for url in both:
        words = [str(NERITE), "client", "--url", url, "stats", "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=True)
        forms.append({entry["name"]: sorted(entry) for entry in json.loads(done.stdout)})
    assert forms[0] == forms[1]
