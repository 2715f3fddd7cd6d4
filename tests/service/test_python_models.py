"""Python models on a running server: their environment, their words, their errors."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from process_family import ticks_of
from serving import IDENTITY, IN_PROCESS, eventually, pbtxt, python_model, serving

TALKER = """
def initialize(self, args):
    print("printed at the start")
    print("complained at the start", file=sys.stderr)
    logging.getLogger("mine").warning("logged at the start")
    pb_utils.Logger.log_info("told Triton's logger")

def finalize(self):
    print("printed at the end")
"""


def test_what_a_model_says_is_in_the_log_with_its_name(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "talker", TALKER + IDENTITY)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        beginning = (
            "printed at the start",
            "complained at the start",
            "logged at the start",
            "told Triton's logger",
        )
        for line in beginning:
            eventually(lambda line=line: line in server.text, what=line)
        server.stop()
        lines = server.text.splitlines()
    for said in (*beginning, "printed at the end"):
        assert any("talker_0_0" in line and said in line for line in lines), said
    (warning,) = [line for line in lines if "logged at the start" in line]
    assert warning.startswith("W")
    assert "model.py:" in warning


def test_a_file_of_another_name(tmp_path: Path) -> None:
    folder = python_model(tmp_path / "models", "named", IDENTITY, pbtxt(more='default_model_filename: "own.py"')) / "1"
    (folder / "model.py").rename(folder / "own.py")
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.infer("named", [1.0, 2.0]) == [1.0, 2.0]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment of a model's own, with numpy and nothing of ours."""
    folder = tmp_path_factory.mktemp("environment") / "own"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True, timeout=60)
    command = [uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python", "numpy", "colorama"]
    subprocess.run(command, check=True, timeout=200)
    yield folder


@pytest.mark.timeout(300)
def test_an_environment_of_its_own(environment: Path, tmp_path: Path) -> None:
    source = """
    def initialize(self, args):
        import colorama
        print("runs in", sys.prefix)
    """
    python_model(
        tmp_path / "models",
        "apart",
        "\n".join(line[4:] for line in source.splitlines()) + IDENTITY,
        pbtxt(parameters=f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{environment}" }} }}'),
    )
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.infer("apart", [1.0, 2.0]) == [1.0, 2.0]
        eventually(lambda: f"runs in {environment}" in server.text)


def test_an_environment_that_is_none(tmp_path: Path) -> None:
    parameters = 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/nowhere/at/all" } }'
    python_model(tmp_path / "models", "apart", IDENTITY, pbtxt(parameters=parameters))
    with serving(tmp_path / "models", tmp_path / "log", "--exit-on-error=false") as server:
        (entry,) = server.json("POST", "/v2/repository/index")
        assert entry["state"] == "UNAVAILABLE"
        assert "/nowhere/at/all" in entry["reason"]


@pytest.mark.parametrize("mode", ["worker", "in_process"])
def test_a_model_that_raises_fails_its_requests_and_goes_on(tmp_path: Path, mode: str) -> None:
    source = """
def execute(self, requests):
    if pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()[0][0] < 0:
        raise ValueError("no negative numbers")
    return [pb_utils.InferenceResponse(error=pb_utils.TritonError("mine", pb_utils.TritonError.NOT_FOUND))]
"""
    parameters = f'parameters {{ key: "EXECUTION_MODE" value: {{ string_value: "{mode}" }} }}'
    python_model(tmp_path / "models", "moody", source, pbtxt(parameters=parameters))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        with pytest.raises(RuntimeError, match=r"500.*Failed to process the request.*no negative numbers"):
            server.infer("moody", [-1.0])
        with pytest.raises(RuntimeError, match=r"404.*mine"):
            server.infer("moody", [1.0])
        assert server.ready("moody")


RESPONSES = """
def execute(self, requests):
    print("together:", len(requests), flush=True)
    return [self.response(request.inputs()[0].as_numpy()) for request in requests]

def response(self, value):
    if value[0, 0] == 1:
        return value
    parameters = {2: {"a": 2**64}, 3: {"a": "half \\ud800"}}.get(int(value[0, 0]))
    return pb_utils.InferenceResponse([pb_utils.Tensor(b"OUTPUT0", value)], parameters=parameters)
"""
TOGETHER = "dynamic_batching { preferred_batch_size: [ 6 ] max_queue_delay_microseconds: 60000000 }"


@pytest.mark.parametrize("mode", ["", IN_PROCESS])
def test_a_response_that_cannot_be_sent_fails_alone(tmp_path: Path, mode: str) -> None:
    python_model(tmp_path / "models", "mixed", RESPONSES, pbtxt(6, TOGETHER, parameters=mode))

    def answer(value: float) -> str:
        try:
            return str(server.infer("mixed", [value]))
        except RuntimeError as error:
            return str(error)

    with serving(tmp_path / "models", tmp_path / "log") as server, ThreadPoolExecutor(6) as threads:
        for _ in range(2):
            answers = list(threads.map(answer, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)))
            assert [answers[place] for place in (0, 4, 5)] == ["[0.0]", "[4.0]", "[5.0]"]
            assert "500: " in answers[1] and "Expected an 'InferenceResponse' object" in answers[1]
            assert "500: " in answers[2] and "Parameter 'a' is an integer beyond 64 bits" in answers[2]
            assert "500: " in answers[3] and "Parameter 'a' is not valid UTF-8 at character 5" in answers[3]
        eventually(lambda: server.text.count("together: 6") == 2)


RESIZED = """
def execute(self, requests):
    print("together:", len(requests), flush=True)
    return [self.response(request.inputs()[0].as_numpy().copy()) for request in requests]

def response(self, value):
    tensor = pb_utils.Tensor("OUTPUT0", value)
    if value[0, 0] == 3:
        value.resize((1, 5), refcheck=False)
    return pb_utils.InferenceResponse([tensor])
"""


def test_an_array_that_is_resized_after_its_tensor_was_made_fails_its_response(tmp_path: Path) -> None:
    """The answers behind it in the message, too, would be read from the wrong place."""
    python_model(tmp_path / "models", "resized", RESIZED, pbtxt(6, TOGETHER))

    def answer(value: float) -> str:
        try:
            return str(server.infer("resized", [value]))
        except RuntimeError as error:
            return str(error)

    with serving(tmp_path / "models", tmp_path / "log") as server, ThreadPoolExecutor(6) as threads:
        for _ in range(2):
            answers = list(threads.map(answer, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)))
            assert [answers[place] for place in (0, 1, 2, 4, 5)] == ["[0.0]", "[1.0]", "[2.0]", "[4.0]", "[5.0]"]
            assert "500: " in answers[3] and "tensor 'OUTPUT0' has 20 bytes, but FP32 [1,1] takes 4" in answers[3]
        eventually(lambda: server.text.count("together: 6") == 2)


def test_several_instances_work_side_by_side(tmp_path: Path) -> None:
    source = """
def execute(self, requests):
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[os.getpid()]], np.float32))])
            for request in requests]
"""
    config = pbtxt(more="").replace("kind: KIND_CPU", "kind: KIND_CPU count: 3")
    python_model(tmp_path / "models", "three", source, config)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert sorted(server.workers()) == ["three_0_0", "three_0_1", "three_0_2"]
        pids = {float(pid) for pid in server.workers().values()}
        assert {server.infer("three", [0.0])[0] for _ in range(12)} == pids


def test_who_has_nothing_to_do_sleeps(tmp_path: Path) -> None:
    """However busy it was a moment ago."""
    python_model(tmp_path / "models", "echo", IDENTITY, pbtxt(batch=8))
    with serving(tmp_path / "models", tmp_path / "log", "--stay-awake-microseconds=1000") as server:
        for _ in range(50):
            server.infer("echo", [1.0])
        processes = [server.process.pid, server.workers()["echo_0_0"]]
        before = [ticks_of(pid) for pid in processes]
        time.sleep(1.0)  # the thing to be measured is what happens while nobody asks
        assert all(ticks_of(pid) - ticks < 20 for pid, ticks in zip(processes, before, strict=True))
