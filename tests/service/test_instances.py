"""Instances: how many run at once, where they run, and how wide."""

from __future__ import annotations

import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from serving import IDENTITY, IN_PROCESS, Serving, adds, eventually, pbtxt, python_model, serving

CORES = sorted(os.sched_getaffinity(0))
SLOW = """
def execute(self, requests):
    answers = []
    for request in requests:
        value = request.inputs()[0].as_numpy()
        print("begins", value[0][0], flush=True)
        began = time.monotonic()
        while value[0][0] < 0 and not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            time.sleep(0.005)
        if value[0][0] == 9:
            os._exit(3)
        time.sleep(0.01)
        times = np.array([[began, time.monotonic()]], np.float64)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", times)]))
    return answers
"""
THREADS = """
def execute(self, requests):
    from ctypes import CDLL
    maps = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
    blas = [CDLL(path).scipy_openblas_get_num_threads64_() for path in maps]
    counts = [int(os.environ.get(name, 0)) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    told = np.array([[*counts, *blas]], np.float32)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", told)]) for _ in requests]
"""


def limited(group: str, count: int = 1, needs: int = 1, more: str = "") -> str:
    """Instances that each need ``needs`` of R."""
    resources = f'rate_limiter {{ resources [{{ name: "R" count: {needs} }}] }}' if needs else ""
    return f'instance_group [{{ name: "{group}" kind: KIND_CPU count: {count} {resources} {more} }}]'


def config(groups: str) -> str:
    """The configuration of a slow model."""
    text = pbtxt(batch=1, more="").replace("instance_group [{ kind: KIND_CPU }]", groups)
    return text.replace('name: "OUTPUT0" data_type: TYPE_FP32', 'name: "OUTPUT0" data_type: TYPE_FP64')


def slow(repository: Path, name: str, groups: str) -> Path:
    return python_model(repository, name, SLOW, config(groups))


def spans(server: Serving, *models: str) -> list[tuple[float, float]]:
    """When each of these requests, sent at once, was executed."""
    with ThreadPoolExecutor(len(models)) as callers:
        answers = list(callers.map(lambda model: server.infer(model, [0.0]), models))
    return sorted((began, ended) for began, ended in answers)


@pytest.mark.parametrize("explicit", [False, True])
def test_models_that_share_a_resource_take_turns(tmp_path: Path, explicit: bool) -> None:
    models = tmp_path / "models"
    slow(models, "one", limited("one", count=2))
    slow(models, "other", limited("other", needs=1))
    flags = ["--rate-limit-resource=R:1"] if explicit else []
    with serving(models, tmp_path / "log", "--rate-limit=execution_count", *flags) as server:
        order = spans(server, *["one", "other"] * 10)
        assert all(ended <= began for (_, ended), (began, _) in pairwise(order))


def test_without_the_flag_resources_are_free(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = slow(models, "one", limited("one"))
    slow(models, "other", limited("other"))
    with serving(models, tmp_path / "log", "--rate-limit-resource=R:0") as server, ThreadPoolExecutor() as callers:
        assert "'one': 'instance_group.rate_limiter' has no effect: start the server with --rate-limit" in server.text
        held = callers.submit(server.infer, "one", [-1.0])
        eventually(lambda: "begins -1.0" in server.text)
        server.infer("other", [0.0])
        assert not held.done()
        (folder / "1" / "go").touch()
        held.result()


def test_waiting_for_a_resource_can_be_given_up(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = slow(models, "one", limited("one"))
    slow(models, "other", limited("other"))
    pending = 'nv_inference_pending_request_count{model="other",version="1"}'
    with (
        serving(models, tmp_path / "log", "--rate-limit=execution_count") as server,
        ThreadPoolExecutor() as callers,
    ):
        held = callers.submit(server.infer, "one", [-1.0])
        eventually(lambda: "begins -1.0" in server.text)
        host, port = server.http.split(":")
        body = b'{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [5]}]}'
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v2/models/other/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            eventually(lambda: server.metrics()[pending] == 1)
        eventually(lambda: server.metrics()[pending] == 0)
        (folder / "1" / "go").touch()
        held.result()
        server.infer("other", [0.0])
        assert "begins 5.0" not in server.text


def test_a_worker_that_dies_gives_back_what_it_had(tmp_path: Path) -> None:
    models = tmp_path / "models"
    slow(models, "one", limited("one"))
    slow(models, "other", limited("other"))
    with serving(models, tmp_path / "log", "--rate-limit=execution_count") as server:
        with pytest.raises(RuntimeError, match="The worker died"):
            server.infer("one", [9.0])
        assert len(spans(server, "other", "one", "other")) == 3


@pytest.mark.parametrize("what", ["the resource alone", "other things, too"])
def test_a_resource_that_becomes_global(tmp_path: Path, what: str) -> None:
    models = tmp_path / "models"
    folder = slow(models, "one", limited("one"))
    flags = ("--rate-limit=execution_count", "--model-control-mode=explicit", "--load-model=one")
    with serving(models, tmp_path / "log", *flags) as server, ThreadPoolExecutor() as callers:
        held = callers.submit(server.infer, "one", [-1.0])
        eventually(lambda: "begins -1.0" in server.text)
        text = config(limited("one").replace('"R"', '"R" global: true'))
        if what != "the resource alone":
            text += 'parameters { key: "new" value: { string_value: "yes" } }'
        (folder / "config.pbtxt").write_text(text)
        assert server.ask("POST", "/v2/repository/models/one/load")[0] == 200
        waiting = callers.submit(server.infer, "one", [5.0])
        eventually(lambda: server.metrics()['nv_inference_pending_request_count{model="one",version="1"}'] == 1)
        (folder / "1" / "go").touch()
        ended, began = held.result()[1], waiting.result()[0]
        assert began >= ended, "what was there before goes first"


def test_more_than_there_is(tmp_path: Path) -> None:
    models = tmp_path / "models"
    slow(models, "fits", limited("fits", needs=2))
    slow(models, "large", limited("large", needs=3))
    flags = ("--rate-limit=execution_count", "--rate-limit-resource=R:2", "--exit-on-error=false")
    with serving(models, tmp_path / "log", *flags) as server:
        assert server.state("large") == "UNAVAILABLE"
        assert 'Resource count for "R" is limited to 2 which will prevent scheduling' in server.text
        assert server.state("fits") == "READY"


def cores_of(process: int) -> str:
    (found,) = re.findall(r"^Cpus_allowed_list:\t(.*)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return str(found)


def test_workers_run_on_the_cores_of_their_policies(tmp_path: Path) -> None:
    models = tmp_path / "models"
    group = "instance_group [{ kind: KIND_CPU }]"
    anywhere = cores_of(os.getpid())
    last = str(CORES[-1])
    for name, policy in (("by_name", "mine"), ("by_node", "node"), ("unknown", "nobody"), ("by_kind", "")):
        chosen = f'instance_group [{{ name: "{name}" kind: KIND_CPU host_policy: "{policy}" }}]'
        python_model(models, name, IDENTITY, pbtxt().replace(group, chosen))
    python_model(models, "inside", adds(1), pbtxt(parameters=IN_PROCESS))
    flags = (f"mine,cpu-cores={last}-{last}", f"cpu,cpu-cores={CORES[0]}-{CORES[0]}", "node,numa-node=0")
    with serving(models, tmp_path / "log", *[f"--host-policy={flag}" for flag in flags]) as server:
        found = {name.removesuffix("_0"): cores_of(process) for name, process in server.workers().items()}
        node = found.pop("by_node")
        assert found == {"by_name": last, "by_kind": str(CORES[0]), "unknown": anywhere}
        assert node
        assert "'inside_0_0' runs on the server's loop: its host policy is ignored" in server.text
        assert cores_of(server.process.pid) == anywhere
        os.kill(server.workers()["by_name_0"], signal.SIGKILL)
        eventually(lambda: "worker 'by_name_0' runs again" in server.text)
        assert cores_of(server.workers()["by_name_0"]) == last


def test_a_policy_that_cannot_be_followed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "plain", IDENTITY)
    with serving(models, tmp_path / "log", "--host-policy=cpu,cpu-cores=9", "--exit-on-error=false") as server:
        (entry,) = server.json("POST", "/v2/repository/index")
        assert "format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got 9" in entry["reason"]


PASSIVE = 'instance_group [{ name: "p" kind: KIND_CPU passive: true }]'
BOTH = 'instance_group [{ name: "p" kind: KIND_CPU passive: true }, { name: "a" kind: KIND_CPU }]'


def test_passive_instances_are_there_and_get_nothing(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = slow(models, "model", PASSIVE)
    flags = ("--model-control-mode=explicit", "--load-model=model")
    with serving(models, tmp_path / "log", *flags) as server:
        assert [*server.workers()] == ["p_0"]
        assert server.ready("model")
        with pytest.raises(RuntimeError, match=r"503.*all instances of the model are passive: none of them takes"):
            server.infer("model", [0.0])
        os.kill(server.workers()["p_0"], signal.SIGKILL)
        eventually(lambda: "worker 'p_0' runs again" in server.text)
        passive = server.workers()["p_0"]

        (folder / "config.pbtxt").write_text(config(BOTH))
        assert server.ask("POST", "/v2/repository/models/model/load")[0] == 200
        assert sorted(server.workers()) == ["a_0", "p_0"]
        assert server.workers()["p_0"] == passive
        order = spans(server, *["model"] * 4)
        assert all(ended <= began for (_, ended), (began, _) in pairwise(order))

        (folder / "config.pbtxt").write_text(config(PASSIVE))
        assert server.ask("POST", "/v2/repository/models/model/load")[0] == 200
        eventually(lambda: [*server.workers()] == ["p_0"])
        with pytest.raises(RuntimeError, match=r"503"):
            server.infer("model", [0.0])
        assert server.ask("POST", "/v2/repository/models/model/unload")[0] == 200
        eventually(lambda: server.workers() == {})


def test_what_waits_when_the_last_active_instance_leaves_is_answered(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = slow(models, "model", BOTH)
    flags = ("--model-control-mode=explicit", "--load-model=model")
    with serving(models, tmp_path / "log", *flags) as server, ThreadPoolExecutor() as callers:
        held = callers.submit(server.infer, "model", [-1.0])
        eventually(lambda: "begins -1.0" in server.text)
        waiting = callers.submit(server.infer, "model", [0.0])
        eventually(lambda: server.metrics()['nv_inference_pending_request_count{model="model",version="1"}'] == 1)
        (folder / "config.pbtxt").write_text(config(PASSIVE))
        assert server.ask("POST", "/v2/repository/models/model/load")[0] == 200
        (folder / "1" / "go").touch()
        assert len(held.result()) == 2
        with pytest.raises(RuntimeError, match=r"503.*all instances of the model are passive"):
            waiting.result()


def test_libraries_start_as_many_threads_as_there_are_cores_for_an_instance(tmp_path: Path) -> None:
    models = tmp_path / "models"
    group = "instance_group [{ kind: KIND_CPU }]"
    for name, count, parameter in (("alone", 1, ""), ("many", len(CORES), ""), ("told", 1, "3")):
        parameters = f'parameters {{ key: "INTRA_OP_THREAD_COUNT" value {{ string_value: "{parameter}" }} }}'
        text = pbtxt(parameters=parameters if parameter else "")
        chosen = f"instance_group [{{ kind: KIND_CPU count: {count} }}]"
        python_model(models, name, THREADS, text.replace(group, chosen))
    with serving(models, tmp_path / "log") as server:
        assert {model: set(server.infer(model, [0.0])) for model in ("alone", "many", "told")} == {
            "alone": {len(CORES)},
            "many": {1},
            "told": {3},
        }
    with serving(models, tmp_path / "log", environment={"OMP_NUM_THREADS": "5"}) as server:
        assert server.infer("many", [0.0])[0] == 5


def test_sequences_wait_for_resources_too(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = slow(models, "one", limited("one"))
    sequences = limited("many", count=2) + "\nsequence_batching { direct {} }"
    slow(models, "many", sequences)
    with (
        serving(models, tmp_path / "log", "--rate-limit=execution_count") as server,
        ThreadPoolExecutor() as callers,
    ):

        def step(sequence: int, number: int) -> list[float]:
            tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [0]}
            edges = {"sequence_start": number == 0, "sequence_end": number == 2}
            body = {"inputs": [tensor], "parameters": {"sequence_id": sequence, **edges}}
            times: list[float] = server.json("POST", "/v2/models/many/infer", body)["outputs"][0]["data"]
            return times

        held = callers.submit(server.infer, "one", [-1.0])
        eventually(lambda: "begins -1.0" in server.text)
        walks = [callers.submit(lambda walk=walk: [step(walk, number) for number in range(3)]) for walk in (1, 2, 3)]
        eventually(lambda: server.metrics()['nv_inference_pending_request_count{model="many",version="1"}'] == 3)
        assert "begins 0.0" not in server.text
        (folder / "1" / "go").touch()
        order = sorted([held.result(), *(times for walk in walks for times in walk.result())])
        assert len(order) == 10
        assert all(ended <= began for (_, ended), (began, _) in pairwise(order))
