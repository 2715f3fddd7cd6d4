"""Rollouts of versions that are broken in seven ways, and of good ones, under 200 requests a second.

The broken ones are found and rolled back, the good ones promoted, and each request gets exactly one answer. Prints how
long that took: ``pytest -sv tests/chaos/test_broken_versions.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from steady_load import SteadyLoad, steady

from llm_models import language_model, write_tokenizer
from serving import IN_PROCESS, Serving, eventually, pbtxt, python_model, serving

DEADLINE = 60
"""Seconds after which a rollout is given up."""
SPEC = {
    "to": 2,
    "steps": [20, 50, 100],
    "hold": "2s",
    "requests": 20,
    "deadline": f"{DEADLINE}s",
    "at-deadline": "rollback",
}
TOKENS = 4
FULL = "Exceeds maximum queue size"
"""What a request is told behind a worker that is stuck, or on a machine that is too slow for this load."""

SINGLE = """
def execute(self, requests):
    answers = []
    for request in requests:
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        error = None
        {breaks}
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values + {version})], error))
    return answers
"""
STREAM = """
async def execute(self, requests):
    import asyncio
    (request,) = requests
    sender, values = request.get_response_sender(), pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
    for number in range({tokens}):
        await asyncio.sleep(({first}) if not number else {between})
        if sender.is_cancelled():
            {cancelled}
            break
        answer = np.append(values, np.float32([{version}, number]))
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", answer)]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TAIL = "{} if values[0] % 7 == 0 else 0.005"
QUICK = pbtxt(parameters=IN_PROCESS)
LEAKS = """
        self.kept = [*getattr(self, "kept", ()), b"x" * (1 << 20)][-400:]"""
STREAMS = pbtxt(0, "model_transaction_policy { decoupled: true }")


def single(version: int, breaks: str = "pass") -> str:
    return SINGLE.format(version=version, breaks=breaks)


def stream(version: int, first: object = 0.005, between: float = 0.01, cancelled: str = "pass") -> str:
    return STREAM.format(version=version, tokens=TOKENS, first=first, between=between, cancelled=cancelled)


class Case(NamedTuple):
    """Two versions of a model, and how a difference between them is found."""

    name: str
    baseline: str
    candidate: str
    config: str
    gates: Sequence[str]
    found: str
    """Reason of the end of the rollout."""
    text: str
    """Part of the sentence about it."""
    failures: tuple[str, ...] = ()
    """What clients may be told by the candidate: what it says itself, or that their stream, begun, cannot go on."""
    force: bool = False

    @property
    def streams(self) -> bool:
        return self.config == STREAMS


BROKEN = (
    Case(
        "errors",
        single(1),
        single(2, "error = pb_utils.TritonError('broken weights') if values.flat[0] % 5 == 0 else None"),
        QUICK, ["errors"], "worse", "requests bad", failures=("broken weights",),
    ),
    Case(
        "3x slower tail", stream(1, TAIL.format(0.1), 0), stream(2, TAIL.format(0.3), 0),
        STREAMS, ["errors", "p95"], "worse", " ms against ",
    ),
    Case(
        "crash loop", single(1), single(2, "values.flat[0] % 4 or os.kill(os.getpid(), signal.SIGKILL)"),
        pbtxt(), ["errors"], "worse", "requests",
    ),
    Case(
        "leak", single(1),
        single(2, LEAKS),
        pbtxt(), ["errors", "memory<=+100%"], "worse", "in the candidate",
    ),
    Case(
        "first token late", stream(1, 0.005, 0.5), stream(2, 1.5, 0),
        STREAMS, ["errors", "ttft_p90"], "worse", " ms against ",
    ),
    Case(
        "hangs on cancel", stream(1), stream(2, cancelled="while True: time.sleep(1)"),
        STREAMS, ["errors", "p95"], "blocked", "A cancelled request still occupies its instance",
    ),
    Case(
        "hangs on cancel, forced", stream(1), stream(2, cancelled="while True: time.sleep(1)"),
        STREAMS, ["errors", "p95"], "worse", "requests bad",
        failures=("it was stuck when its version was rolled back",), force=True,
    ),
)  # fmt: skip


def read_single(number: int, parts: Sequence[dict[str, Any]]) -> str:
    (answer,) = parts
    version: str = answer["model_version"]
    assert (answer["id"], answer["outputs"][0]["data"]) == (f"r{number}", [number + int(version)])
    return version


def read_stream(number: int, parts: Sequence[dict[str, Any]]) -> str:
    (version,) = {each["model_version"] for each in parts}
    assert {each["id"] for each in parts} == {f"r{number}"}
    assert [each["OUTPUT0"] for each in parts] == [[number, int(version), place] for place in range(TOKENS)]
    return str(version)


def body_of_single(number: int) -> dict[str, Any]:
    shape = [1, 1]
    return {"inputs": [{"name": "INPUT0", "shape": shape, "datatype": "FP32", "data": [number]}]}


@contextmanager
def under_load(server: Serving, case: Case, most: int = 1_000_000) -> Iterator[SteadyLoad]:
    if case.streams:
        path = "/v2/models/m/generate_stream"
        with steady(server, path, lambda number: {"INPUT0": number}, read_stream, cuts=True, most=most) as load:
            yield load
    else:
        with steady(server, "/v2/models/m/infer", body_of_single, read_single, most=most) as load:
            yield load


def status(server: Serving, model: str = "m") -> dict[str, Any]:
    found: dict[str, Any] = server.json("GET", f"/v2/models/{model}/rollout")
    return found


def end_of(server: Serving, spec: dict[str, Any], model: str = "m") -> dict[str, Any]:
    """Begin a rollout and wait for its end; return its status. Prints how long it has taken."""
    posted = time.monotonic()
    code, _, body = server.ask("POST", f"/v2/models/{model}/rollout", spec)
    assert code == 200, body
    eventually(lambda: status(server, model)["state"] != "checking", what="the check does not end")
    began = time.monotonic()
    eventually(lambda: status(server, model)["state"] != "running", DEADLINE + 10, what="it does not end")
    found = status(server, model)
    requests = found["arms"]["candidate"]["requests"]
    if found["reason"] == "blocked":
        text = f"by the check, in {time.monotonic() - posted:.1f} s, before its first request"
    else:
        text = f"in {time.monotonic() - began:.1f} s, after {requests} requests to it"
    print(f"\n{found['state']}: {text}: {found['text']}")
    return found


def failures(load: SteadyLoad) -> int:
    """Return the number of errors, without those of a queue that a slow machine has filled."""
    return sum(count for text, count in load.failures.items() if FULL not in text)


@pytest.mark.parametrize("case", BROKEN, ids=[case.name for case in BROKEN])
def test_a_broken_version_is_found_and_rolled_back(tmp_path: Path, case: Case) -> None:
    models = tmp_path / "models"
    python_model(models, "m", case.baseline, case.config)
    with serving(models, tmp_path / "log", f"--rollout-state={tmp_path / 'state'}") as server:
        python_model(models, "m", case.candidate, case.config, version=2)
        with under_load(server, case) as load:
            eventually(lambda: load.answers["1"] > 400)
            found = end_of(server, {**SPEC, "gate": case.gates, "force": case.force})
            assert (found["reason"], case.text in found["text"]) == (case.found, True)
            assert found["state"] == ("aborted" if case.found == "blocked" else "rolled_back")
            assert found["weight"] == 0
            eventually(lambda: server.state("m", "2") != "READY", what="the candidate stays loaded")
            before = failures(load)
            after = load.answers["1"] + 200
            eventually(lambda: load.answers["1"] > after, what="it does not go on")
            assert failures(load) == before, "errors after the rollback"
    assert all(any(text in each for text in (*case.failures, FULL)) for each in load.failures), load.failures
    assert case.found != "blocked" or "2" not in load.answers


SPREAD = "0.005 + 0.002 * (values[0] % 10)"
GOOD = Case("good", single(1), single(2), QUICK, ["errors=+50%,5%"], "not_worse", "")
GOOD_STREAMS = Case(
    "streams", stream(1, SPREAD), stream(2, SPREAD), STREAMS, ["errors=+50%,5%", "ttft_p90=+200%"], "not_worse", ""
)


@pytest.mark.parametrize(
    ("case", "fronts"), [(GOOD, 1), (GOOD, 2), (GOOD_STREAMS, 1)], ids=["single", "single, fronts", "streams"]
)
def test_a_good_version_is_promoted(tmp_path: Path, case: Case, fronts: int) -> None:
    models = tmp_path / "models"
    python_model(models, "m", case.baseline, case.config)
    flags = (f"--rollout-state={tmp_path / 'state'}", f"--front-processes={fronts}")
    with serving(models, tmp_path / "log", *flags) as server:
        python_model(models, "m", case.candidate, case.config, version=2)
        with under_load(server, case, most=100) as load:
            found = end_of(server, {**SPEC, "gate": case.gates})
            assert (found["state"], found["weight"]) == ("promoted", 100), (found["holds"], found["gates"])
            after = load.answers["2"] + 200
            eventually(lambda: load.answers["2"] > after, what="it does not go on")
            first = load.answers["1"]
            eventually(lambda: load.answers["2"] > after + 200, what="it does not go on")
            assert load.answers["1"] == first, "the former version still answers"
    assert not load.failures


PROMPT = "who"


def read_text(number: int, parts: Sequence[dict[str, Any]]) -> str:
    (answer,) = parts
    assert (answer["id"], answer["text_output"].startswith(PROMPT)) == (f"r{number}", True)
    return str(answer["model_version"])


def test_a_version_with_the_wrong_tokenizer_is_found_before_its_first_request(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for version in (1, 2):
        directory = language_model(models / "chat" / str(version))
        if version == 2:
            write_tokenizer(directory, begin=True)
    (models / "chat" / "config.pbtxt").write_text(
        'backend: "llm"\nversion_policy { specific { versions: [ 1 ] } }\n'
        'parameters { key: "MAX_NUM_SEQS" value { string_value: "64" } }\n'
    )
    said = {"text_input": PROMPT, "parameters": {"max_tokens": 1, "temperature": 0, "ignore_eos": True}}
    with (
        serving(models, tmp_path / "log", f"--rollout-state={tmp_path / 'state'}") as server,
        steady(server, "/v2/models/chat/generate", lambda _: said, read_text) as load,
    ):
        eventually(lambda: load.answers["1"] > 400)
        found = end_of(server, {**SPEC, "gate": ["errors", "p95"]}, "chat")
        assert (found["state"], found["reason"]) == ("aborted", "blocked")
        assert "tokenizer, probe text 'English'" in found["text"]
        after = load.answers["1"] + 200
        eventually(lambda: load.answers["1"] > after, what="it does not go on")
    assert set(load.answers) == {"1"}
    assert all(FULL in each for each in load.failures), "the machine may be too slow for it"
