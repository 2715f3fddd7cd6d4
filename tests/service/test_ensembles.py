"""Ensembles on a real server: steps that run at a time, callers that give up, workers that die, files that are late."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving import Serving, adds, ensemble, eventually, pbtxt, python_model, serving, step

MEETS = """
def execute(self, requests):
    \"\"\"Answers once the other of the two is here as well, which writes a file of its own.\"\"\"
    mine, other = (os.path.join(FOLDER, name) for name in (ME, OTHER))
    for _ in requests:
        open(mine, "w").close()
        deadline = time.monotonic() + 20
        while not os.path.exists(other) and time.monotonic() < deadline:
            time.sleep(0.005)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() +
            os.path.exists(other))]
        )
        for request in requests
    ]
"""
WAITS = """
def execute(self, requests):
    for request in requests:
        value = float(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().reshape(-1)[0])
        print(f"begins {value}", flush=True)
        while value < 0 and not request.is_cancelled():
            time.sleep(0.005)
        print(f"ends {value}", flush=True)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""


COUNTS = """
def execute(self, requests):
    \"\"\"Answers how many of its instances ran at the time.\"\"\"
    import glob, tempfile
    answers = []
    for request in requests:
        seconds = float(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().reshape(-1)[0])
        folder = os.path.dirname(__file__)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".running"):
            time.sleep(seconds)
            running = len(glob.glob(os.path.join(folder, "*.running")))
        answers.append(
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[running]], np.float32))])
        )
    return answers
"""


ON_ITS_WAY = """
def execute(self, requests):
    print("is on its way", flush=True)
    while not os.path.exists(GO):
        time.sleep(0.005)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""


def test_files_that_come_in_any_order(tmp_path: Path) -> None:
    models = tmp_path / "models"
    ensemble(models, "chain", step("first", "INPUT0", "OUTPUT0"))
    flags = (
        "--model-control-mode=poll",
        "--repository-poll-secs=1",
        "--strict-readiness=false",
        "--exit-on-error=false",
    )
    with serving(models, tmp_path / "log", *flags) as server:
        assert not server.ready("chain")
        assert server.ready()
        assert "contains models that are not available or ambiguous: first" in server.text
        python_model(models, "first", adds(1), pbtxt(batch=1, more=""))
        eventually(lambda: server.ready("chain"))
        assert server.infer("chain", [1.0]) == [2.0]
        python_model(models, "first", adds(3), pbtxt(batch=1, more=""))
        eventually(lambda: server.infer("chain", [1.0]) == [4.0])


def test_a_step_is_unloaded_once_the_ensemble_is_loaded(tmp_path: Path) -> None:
    """As with Triton the load ends well, and the ensemble goes with its model then."""
    models = tmp_path / "models"
    python_model(models, "first", adds(1))
    wait = f"""
        def initialize(self, args):
            print("is made", flush=True)
            while not os.path.exists({str(tmp_path / "go")!r}):
                time.sleep(0.01)
        """
    python_model(models, "last", textwrap.dedent(wait) + adds(1))
    ensemble(models, "inner", step("first", "INPUT0", "X"), step("last", "X", "OUTPUT0"))
    ensemble(models, "outer", step("inner", "INPUT0", "OUTPUT0"))
    with serving(models, tmp_path / "log", "--model-control-mode=explicit") as server, ThreadPoolExecutor(2) as threads:

        def ask(verb: str, model: str) -> int:
            return server.ask("POST", f"/v2/repository/models/{model}/{verb}")[0]

        loading = threads.submit(ask, "load", "outer")
        eventually(lambda: "is made" in server.text and server.ready("first"))
        unloading = threads.submit(ask, "unload", "first")
        assert server.infer("first", [1.0]) == [2.0]
        assert not unloading.done()
        (tmp_path / "go").touch()
        assert (loading.result(), unloading.result()) == (200, 200)
        eventually(lambda: [server.state(name) for name in ("first", "inner", "outer")] == ["UNAVAILABLE"] * 3)
        assert server.ready("last")


def test_the_times_of_a_model_that_was_reloaded_are_counted(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "part", adds(1), pbtxt(batch=1, more=""))
    ensemble(models, "chain", step("part", "INPUT0", "OUTPUT0"))
    with serving(models, tmp_path / "log", "--model-control-mode=explicit", "--load-model=*") as server:

        def computed() -> int:
            (counted,) = server.json("GET", "/v2/models/chain/stats")["model_stats"]
            ns: int = counted["inference_stats"]["compute_infer"]["ns"]
            return ns

        assert server.infer("chain", [1.0]) == [2.0]
        before = computed()
        python_model(models, "part", adds(2), pbtxt(batch=1, more=""))
        server.ask("POST", "/v2/repository/models/part/load")
        assert server.infer("chain", [1.0]) == [3.0]
        assert computed() > before > 0


def test_unloaded_while_requests_are_on_their_way(tmp_path: Path) -> None:
    models = tmp_path / "models"
    go = tmp_path / "go"
    python_model(models, "slow", ON_ITS_WAY.replace("GO", repr(str(go))), pbtxt(batch=1, more=""))
    python_model(models, "after", adds(1), pbtxt(batch=1, more=""))
    ensemble(models, "chain", step("slow", "INPUT0", "t"), step("after", "t", "OUTPUT0"))
    flags = ("--model-control-mode=explicit", "--load-model=chain")
    with serving(models, tmp_path / "log", *flags) as server, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(server.infer, "chain", [1.0])
        eventually(lambda: "is on its way" in server.text)
        unload = {"parameters": {"unload_dependents": True}}
        assert server.ask("POST", "/v2/repository/models/chain/unload", unload)[0] == 200
        assert server.ask("POST", "/v2/models/chain/infer", b"{}")[0] == 404
        assert server.state("after") == "UNLOADING"
        go.touch()
        assert asked.result() == [2.0], "a request that was under way is answered"
        for model in ("chain", "slow", "after"):
            eventually(lambda model=model: server.state(model) == "UNAVAILABLE")  # type: ignore[misc]


IN_PLACE = """
def execute(self, requests):
    responses = []
    for request in requests:
        given = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        given += 1
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", given)]))
    return responses
"""
MADE = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", np.zeros((1, 100_000), np.float32))]
        )
        for _ in requests
    ]
"""


def test_large_tensors_go_from_worker_to_worker_as_they_lie(tmp_path: Path) -> None:
    """A step may work in place, and hands on what it was given: three workers, one piece of memory, of the first."""
    models = tmp_path / "models"
    python_model(models, "made", MADE, pbtxt(batch=1, more=""))
    for name in ("second", "third"):
        python_model(models, name, IN_PLACE, pbtxt(batch=1, more=""))
    ensemble(models, "chain", step("made", "INPUT0", "A"), step("second", "A", "B"), step("third", "B", "OUTPUT0"))
    with serving(models, tmp_path / "log") as server:
        for _ in range(3):
            assert server.infer("chain", [1.0]) == [2.0] * 100_000
        # Each lies in the worker that made it, and in those that it was lent to; nobody else has memory of that kind.
        mapped = {name: arenas(pid) for name, pid in server.workers().items()}
        assert mapped["made_0_0"] == mapped["second_0_0"] == mapped["third_0_0"]
        assert len(mapped["made_0_0"]) == 1


def arenas(pid: int) -> set[str]:
    """The inodes of the anonymous files that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:nerite" in line}


def test_nobody_writes_into_a_tensor_that_others_take_too(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "made", MADE, pbtxt(batch=1, more=""))
    python_model(models, "writes", IN_PLACE, pbtxt(batch=1, more=""))
    ensemble(models, "chain", step("made", "INPUT0", "A"), step("writes", "A", "B"), outputs=("A", "B"))
    with serving(models, tmp_path / "log") as server:
        body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        status, _, answer = server.ask("POST", "/v2/models/chain/infer", body)
        assert status == 500
        assert b"output array is read-only" in answer
        only_a = {**body, "outputs": [{"name": "A"}]}
        assert set(server.json("POST", "/v2/models/chain/infer", only_a)["outputs"][0]["data"]) == {0.0}
        only_b = {**body, "outputs": [{"name": "B"}]}
        assert set(server.json("POST", "/v2/models/chain/infer", only_b)["outputs"][0]["data"]) == {1.0}


NUMBERS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(12):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[number]], np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
OVERTAKES = """
def execute(self, requests):
    answers = []
    for request in requests:
        number = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        time.sleep(0.004 if number[0, 0] % 3 == 0 else 0.001)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", number)]))
    return answers
"""


def test_steps_that_do_not_need_each_other_run_at_a_time(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name, me, other in (("left", "a", "b"), ("right", "b", "a")):
        source = MEETS.replace("FOLDER", repr(str(tmp_path))).replace("ME", repr(me)).replace("OTHER", repr(other))
        python_model(models, name, source, pbtxt(batch=1, more=""))
    ensemble(models, "both", step("left", "INPUT0", "L"), step("right", "INPUT0", "R"), outputs=("L", "R"))
    with serving(models, tmp_path / "log") as server:
        body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        answer = server.json("POST", "/v2/models/both/infer", body)
        assert sorted(output["data"] for output in answer["outputs"]) == [[2.0], [2.0]], "they did not meet"


def test_a_client_that_hangs_up_ends_the_step_and_no_other_begins(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "waits", WAITS, pbtxt(batch=1, more=""))
    python_model(models, "after", WAITS, pbtxt(batch=1, more=""))
    ensemble(models, "chain", step("waits", "INPUT0", "t"), step("after", "t", "OUTPUT0"))
    with serving(models, tmp_path / "log") as server:
        asking = threading.Thread(target=hang_up, args=(server, "begins -1.0"))
        asking.start()
        asking.join()
        eventually(lambda: "ends -1.0" in server.text)
        assert server.infer("chain", [2.0]) == [2.0]
        assert server.text.count("begins -1.0") == 1
        failed = 'nv_inference_request_failure{model="chain",reason="CANCELED",version="1"}'
        eventually(lambda: server.metrics()[failed] == 1)


def hang_up(server: Serving, once: str) -> None:
    """Ask, and go away once the log says so."""
    import socket

    host, port = server.http.split(":")
    raw = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [-1]}]}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw)
        connection.sendall(head + raw)
        eventually(lambda: once in server.text)


def test_a_worker_that_dies_fails_those_it_had_and_says_where(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "first", adds(1), pbtxt(batch=1, more=""))
    python_model(models, "second", WAITS, pbtxt(batch=1, more=""))
    ensemble(models, "chain", step("first", "INPUT0", "t"), step("second", "t", "OUTPUT0"))
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [-5]}]}
    with serving(models, tmp_path / "log") as server, ThreadPoolExecutor(1) as thread:
        failing = thread.submit(server.ask, "POST", "/v2/models/chain/infer", json.dumps(body).encode())
        eventually(lambda: "begins -4.0" in server.text)
        worker = next(pid for name, pid in server.workers().items() if name.startswith("second"))
        os.kill(worker, signal.SIGKILL)
        status, _, told = failing.result()
        assert status == 500
        message = json.loads(told)["error"]
        assert message.startswith("in ensemble 'chain', ")
        assert "at step 2 of 'chain': model 'second', version 1, given INPUT0 FP32 [1,1]" in message
        eventually(lambda: server.ready("second"))
        assert server.infer("chain", [4.0]) == [5.0]


def test_max_inflight_requests(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "counts", COUNTS, pbtxt(batch=1, more="instance_group [{ count: 4 kind: KIND_CPU }]"))
    ensemble(models, "one", step("counts", "INPUT0", "OUTPUT0"), more="max_inflight_requests: 1")
    with serving(models, tmp_path / "log") as server, ThreadPoolExecutor(4) as threads:
        assert "Ensemble model 'one' configured with max_inflight_requests: 1" in server.text
        answers = list(threads.map(lambda _: server.infer("one", [0.1]), range(4)))
        assert answers == [[1.0]] * 4, "more than one ran at a time"


def test_the_words_of_a_stream_keep_their_places(tmp_path: Path) -> None:
    models = tmp_path / "models"
    decoupled = pbtxt(batch=1, more="model_transaction_policy { decoupled: true }")
    python_model(models, "counts", NUMBERS, decoupled)
    two = pbtxt(batch=1, more="").replace("kind: KIND_CPU", "kind: KIND_CPU count: 2")
    python_model(models, "overtakes", OVERTAKES, two)
    ensemble(models, "both", step("counts", "INPUT0", "number"), step("overtakes", "number", "OUTPUT0"))
    with serving(models, tmp_path / "log") as server:

        def words(_: int) -> list[float]:
            status, _, body = server.ask("POST", "/v2/models/both/generate_stream", {"INPUT0": [1.0]})
            assert status == 200, body
            return [json.loads(line[6:])["OUTPUT0"] for line in body.splitlines() if line.startswith(b"data: ")]

        with ThreadPoolExecutor(4) as pool:
            told = list(pool.map(words, range(60)))
    assert told == [[float(number) for number in range(12)]] * 60
