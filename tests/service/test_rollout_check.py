"""The check before a rollout, by real servers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from embedded import embedded
from llm_models import language_model, write_tokenizer
from nerite.core.errors import InvalidArgument
from nerite.rollouts.check import DEFAULT_LIMITS, CheckLimits, differences, refuse_if_blocked
from nerite.rollouts.difference import Difference
from nerite.rollouts.trials import TrialLimits
from serving import IDENTITY, IN_PROCESS, NERITE, Serving, adds, ensemble, pbtxt, python_model, serving, step

STREAM = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for _ in range({count}):
            if request.is_cancelled():
                while {hangs}:
                    time.sleep(0.01)
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.ones((1, 1), np.float32))]))
            time.sleep(0.01)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = pbtxt(0, "model_transaction_policy { decoupled: true }")
BUSY = """
def execute(self, requests):
    while True:
        time.sleep(0.01)
"""
BROKEN = "def initialize(self, args):\n    raise ValueError('no weights')\n" + IDENTITY
LOCK = "--http-restricted-api=model-repository:secret=opensesame"


def checked(
    repository: Path, *loaded: str, model: str = "m", to: str = "2", limits: CheckLimits = DEFAULT_LIMITS
) -> list[Difference]:
    """Check version 1 of a model against another arm, with a server of the models ``loaded``."""

    async def inside() -> list[Difference]:
        async with embedded(repository) as server:
            for name in loaded or (model,):
                await server.manager.load(name)
            running = [each.number for each in server.server.running_versions()]
            try:
                return await differences(server.server, model, "1" if to.isdecimal() else model, to, limits)
            finally:
                assert [each.number for each in server.server.running_versions()] == running
                assert all(each["version"] == "1" for each in await server.index() if "version" in each)

    return asyncio.run(inside())


def later(repository: Path, name: str, source: str, config: str) -> None:
    """Write version 2 of a model, which version 1 alone is served of."""
    specific = config + "version_policy { specific { versions: [ 1 ] } }\n"
    python_model(repository, name, source, specific, version=2)


def subjects(found: Sequence[Difference]) -> list[tuple[str, str]]:
    return [(each.severity.value, each.subject) for each in found if each.subject != "version_policy"]


def test_an_identical_pair(tmp_path: Path) -> None:
    python_model(tmp_path, "m", adds(1))
    later(tmp_path, "m", adds(1), pbtxt())
    found = checked(tmp_path)
    assert subjects(found) == []
    assert [each.subject for each in found] == ["version_policy"], "it would select version 1 again"
    refuse_if_blocked(found)


def test_another_output_type(tmp_path: Path) -> None:
    python_model(tmp_path, "m", IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(tmp_path, "n", IDENTITY, pbtxt(datatype="TYPE_INT32", parameters=IN_PROCESS))
    found = checked(tmp_path, "m", "n", to="n")
    assert [subject for severity, subject in subjects(found) if severity == "blocks"] == [
        "input 'INPUT0'",
        "output 'OUTPUT0'",
        "an inference (made-up data, INPUT0 [1,128])",
    ]
    with pytest.raises(InvalidArgument, match="cannot replace the baseline: input 'INPUT0': Requests with"):
        refuse_if_blocked(found)


ONLY = """
def execute(self, requests):
    found = pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()
    if found.shape[1:] != (3, {size}, {size}):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(f"not so: {{found.shape}}"))]
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", found)])]
"""


def test_pictures_have_a_size_that_the_baseline_accepts(tmp_path: Path) -> None:
    python_model(tmp_path, "m", ONLY.format(size=640), pbtxt(dims="3, -1, -1"))
    python_model(tmp_path, "n", ONLY.format(size=32), pbtxt(dims="3, -1, -1"))
    (found,) = [each for each in checked(tmp_path, "m", "n", to="n") if each.severity.value == "blocks"]
    assert found.subject == "an inference (made-up data, INPUT0 [1,3,640,640])"
    assert found.candidate == "error: not so: (1, 3, 640, 640)"
    python_model(tmp_path, "o", ONLY.format(size=48), pbtxt(dims="3, -1, -1"))
    (found,) = [each for each in checked(tmp_path, "o", "n", model="o", to="n") if "inference" in each.subject]
    assert found.subject == "an inference (made-up data, INPUT0 [1,3,224,224])"
    assert found.consequence.startswith("Neither answers it")


def test_decoupled_against_one_response(tmp_path: Path) -> None:
    python_model(tmp_path, "m", STREAM.format(count=5, hangs=False), DECOUPLED)
    python_model(tmp_path, "n", IDENTITY, pbtxt(0, ""))
    assert ("blocks", "decoupled") in subjects(checked(tmp_path, "m", "n", to="n"))
    (found, *_) = checked(tmp_path, "n", "m", model="n", to="m")
    assert (found.severity.value, found.subject) == ("blocks", "decoupled")


def test_a_stream_that_is_none(tmp_path: Path) -> None:
    python_model(tmp_path, "m", STREAM.format(count=5, hangs=False), DECOUPLED)
    later(tmp_path, "m", STREAM.format(count=1, hangs=False), DECOUPLED)
    assert subjects(checked(tmp_path)) == [("blocks", "streaming")]


def test_a_candidate_that_hangs_on_cancel(tmp_path: Path) -> None:
    python_model(tmp_path, "m", STREAM.format(count=20, hangs=False), DECOUPLED)
    later(tmp_path, "m", STREAM.format(count=20, hangs=True), DECOUPLED)
    limits = CheckLimits(trials=TrialLimits(cancel=1.0))
    (found,) = [each for each in checked(tmp_path, limits=limits) if each.severity.value == "blocks"]
    assert found.subject == "cancellation"
    assert found.consequence == ("A cancelled request still occupies its instance after 1 s: disconnects pile up.")


def test_a_candidate_that_does_not_answer(tmp_path: Path) -> None:
    python_model(tmp_path, "m", IDENTITY)
    later(tmp_path, "m", BUSY, pbtxt())
    limits = CheckLimits(trials=TrialLimits(answer=1.0))
    found = checked(tmp_path, limits=limits)
    assert subjects(found) == [("blocks", "an inference (made-up data, INPUT0 [1,128])")]
    assert found[0].candidate == "no answer"


def test_a_check_that_takes_too_long(tmp_path: Path) -> None:
    python_model(tmp_path, "m", IDENTITY)
    later(tmp_path, "m", "def initialize(self, args):\n    time.sleep(20)\n" + IDENTITY, pbtxt())
    (found,) = checked(tmp_path, limits=CheckLimits(seconds=1.0))
    assert (found.severity.value, found.subject) == ("blocks", "time")
    assert "while loading the candidate" in found.consequence


def test_a_candidate_that_cannot_be_loaded(tmp_path: Path) -> None:
    python_model(tmp_path, "m", IDENTITY)
    later(tmp_path, "m", BROKEN, pbtxt())
    (found,) = checked(tmp_path)
    assert (found.severity.value, found.subject) == ("blocks", "load")
    assert "no weights" in found.consequence
    (found,) = checked(tmp_path, to="3")
    assert "version 3 has no directory" in found.consequence


def test_memory_that_does_not_suffice(tmp_path: Path) -> None:
    python_model(tmp_path, "m", IDENTITY)
    later(tmp_path, "m", IDENTITY, pbtxt())
    (tmp_path / "m" / "2" / "weights").write_bytes(bytes(5 << 20))
    (found,) = checked(tmp_path, limits=CheckLimits(memory=1 << 20))
    assert (found.severity.value, found.subject) == ("blocks", "memory")
    assert "exceed the limit of 1 MiB" in found.consequence


def test_ensembles(tmp_path: Path) -> None:
    python_model(tmp_path, "m", IDENTITY, pbtxt(parameters=IN_PROCESS))
    for name in ("a", "b"):
        ensemble(tmp_path, name, step("m", "INPUT0", "OUTPUT0"))
    assert checked(tmp_path, "a", "b", model="a", to="b") == []
    (tmp_path / "a" / "2").mkdir()
    config = tmp_path / "a" / "config.pbtxt"
    config.write_text(config.read_text() + "version_policy { specific { versions: [ 1 ] } }\n")
    (found,) = checked(tmp_path, "a", model="a")
    assert "would have the same steps" in found.consequence


@pytest.mark.parametrize("arm", ["1", "m", "m/1", "n/5", "unknown", "m/x"])
def test_arms_that_cannot_be_compared(tmp_path: Path, arm: str) -> None:
    for name in ("m", "n"):
        python_model(tmp_path, name, IDENTITY, pbtxt(parameters=IN_PROCESS))
    with pytest.raises(Exception, match=r"same version|is not loaded|unknown model|neither a version"):
        checked(tmp_path, "m", "n", to=arm)


def chat(models: Path, version: int, *, template: str = "{{ messages[0].content }}") -> Path:
    """Write a version of a language model."""
    directory = language_model(models / "chat" / str(version))
    (directory / "chat_template.jinja").write_text(template)
    (models / "chat" / "config.pbtxt").write_text(
        'backend: "llm"\nversion_policy { specific { versions: [ 1 ] } }\n'
        'parameters { key: "MAX_NUM_SEQS" value { string_value: "4" } }\n'
    )
    return directory


def test_equal_language_models(tmp_path: Path) -> None:
    for version in (1, 2):
        chat(tmp_path, version)
    assert subjects(checked(tmp_path, model="chat")) == []


def test_another_tokenizer_and_another_template(tmp_path: Path) -> None:
    chat(tmp_path, 1)
    directory = chat(tmp_path, 2, template="<user>{{ messages[0].content }}")
    write_tokenizer(directory, "<|im_start|>", begin=True)
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": 5}))
    found = checked(tmp_path, model="chat")
    tokens = [each for each in found if each.subject.startswith("tokenizer")]
    assert tokens[0].subject == "tokenizer, probe text 'English'"
    assert tokens[0].severity.value == "blocks"
    assert "The quick brown fox" in tokens[0].consequence
    assert tokens[0].candidate.split(": ")[1].startswith("0 "), "it begins with a special token"
    (rendered,) = [each for each in found if each.subject == "chat template, a question"]
    assert "<user>Hello" in rendered.candidate and "<user>" not in rendered.baseline
    assert {("warns", "sampling default 'temperature'"), ("warns", "stop tokens 'eos_token_id'")} <= {*subjects(found)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("check")
    models = folder / "models"
    python_model(models, "m", adds(1))
    later(models, "m", adds(1), pbtxt())
    python_model(models, "n", IDENTITY, pbtxt(datatype="TYPE_INT32"))
    with serving(models, folder / "log", LOCK, "--front-processes=2") as running:
        yield running


def command(server: Serving, *arguments: str, key: str = "opensesame") -> subprocess.CompletedProcess[str]:
    call = [str(NERITE), "rollout", "check", *arguments, "--url", server.http, "--header", f"secret: {key}"]
    return subprocess.run(call, capture_output=True, text=True, timeout=90, check=False, env=dict(os.environ))


def test_the_command(server: Serving) -> None:
    done = command(server, "m", "--from", "1", "--to", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("warns  version_policy: selects 1 -> version 2\n")
    assert done.stdout.endswith("\n1 warns\n")
    done = command(server, "m", "--to", "n", "--json")
    assert done.returncode == 1, done.stderr
    found = [Difference.from_json(each) for each in json.loads(done.stdout)["differences"]]
    assert ("blocks", "output 'OUTPUT0'") in subjects(found)
    assert server.infer("m", [1.0]) == [2.0]


def test_what_the_command_cannot_check(server: Serving) -> None:
    done = command(server, "m", "--to", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "baseline and candidate are the same version" in done.stderr
    assert command(server, "m").returncode == 2
    assert command(server, "m", "--to", "2", key="guess").returncode == 2
    call = [str(NERITE), "rollout", "check", "m", "--to", "2", "--url", "127.0.0.1:1"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 2
    assert "Start a server: nerite serve REPOSITORY." in done.stderr


@pytest.mark.parametrize(
    ("document", "refusal"),
    [
        ({}, "'from' must be a version"),
        ({"from": 1}, "'to' must be a version"),
        ({"from": 1, "to": True}, "'to' must be a version"),
        ({"from": 1, "to": "x" * 9999}, "'to'"),
        ({"from": 1, "to": 2, "second": 3}, "Did you mean 'seconds'?"),
        ({"from": 1, "to": 2, "seconds": 0}, "'seconds' must be a number of seconds"),
        ({"from": 1, "to": 2, "memory_limit": -1}, "'memory_limit' must be a number of bytes"),
    ],
)
def test_documents_that_are_refused(server: Serving, document: dict[str, Any], refusal: str) -> None:
    status, _, body = server.ask("POST", "/v2/models/m/rollout/check", document, secret="opensesame")
    assert status == 400
    assert refusal in json.loads(body)["error"]


def test_the_endpoint_is_restricted_like_the_repository(server: Serving) -> None:
    assert server.ask("POST", "/v2/models/m/rollout/check", {"from": 1, "to": 2})[0] == 403
    assert server.ask("GET", "/v2/models/m/rollout/check", secret="opensesame")[0] in (400, 405)
    assert server.ask("POST", "/v2/models/none/rollout/check", {"from": 1, "to": 2}, secret="opensesame")[0] == 404
