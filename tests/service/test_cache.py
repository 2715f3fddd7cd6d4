"""The response cache of a real server, in this process and in Redis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
import trustme
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from grpc_streams import Stream
from redis_server import Redis, redis_server
from regions import region
from serving import NERITE, Serving, adds, binary_request, ensemble, eventually, pbtxt, python_model, serving, step

CACHED = pbtxt(more="dynamic_batching {} response_cache { enable: true }")
COUNTS = """
def initialize(self, args):
    self.asked = 0

def execute(self, requests):
    answers = []
    for request in requests:
        self.asked += 1
        given = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        if given.flat[0] < 0:
            time.sleep(-float(given.flat[0]))
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", given + self.asked)]))
    return answers
"""
LOOKUPS = "nv_cache_num_lookups"
LOCAL = "--cache-config=local,size=10000000"


def stats(server: Serving, model: str = "counts") -> dict[str, int]:
    """How often a model was asked, by the way in which it was answered."""
    (version,) = server.json("GET", f"/v2/models/{model}/stats")["model_stats"]
    counts = {name: each["count"] for name, each in version["inference_stats"].items()}
    return {"executions": version["execution_count"], **counts}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    python_model(folder, "counts", COUNTS, CACHED)
    python_model(folder, "uncached", COUNTS)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(repository, tmp_path_factory.mktemp("log") / "log", LOCAL, "--allow-client-shm=true") as running:
        yield running


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    with redis_server(tmp_path / "redis") as running:
        yield running


def test_large_tensors(server: Serving) -> None:
    """They come from memory of the worker's, which is used again while the cache has what was in it."""
    array = np.arange(250_000, dtype=np.float32).reshape(1, -1)

    def ask(add: int) -> bytes:
        body, headers = binary_request(array + add)
        return server.ask("POST", "/v2/models/counts/infer", body, **headers)[2]

    first = ask(0)
    others = [ask(add) for add in (1, 2)]
    assert [ask(0), ask(1), ask(2)] == [first, *others]
    assert len({first, *others}) == 3


def test_what_the_metrics_tell(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", "--cache-config=local,size=1048576") as server:
        for row in [1, 1, *range(8)]:
            array = np.full((1, 50_000), row, np.float32)
            body, headers = binary_request(array)
            assert server.ask("POST", "/v2/models/counts/infer", body, **headers)[0] == 200
        page = server.metrics()
    of_model = [page[f'nv_cache_num_{what}_per_model{{model="counts",version="1"}}'] for what in ("hits", "misses")]
    assert of_model == [page["nv_cache_num_hits"], page["nv_cache_num_misses"]]
    assert (page[LOOKUPS], *of_model) == (10, 2, 8)
    for what in ("hit", "miss"):
        assert page[f'nv_cache_{what}_duration_per_model{{model="counts",version="1"}}'] > 0
    assert page["nv_cache_num_evictions"] == 8 - page["nv_cache_num_entries"] > 0
    assert 0.5 < page["nv_cache_util"] <= 1
    assert page["nv_cache_lookup_duration"] > 0
    assert page["nv_cache_insertion_duration"] > 0


def test_equal_requests_at_the_same_time_are_computed_once(server: Serving) -> None:
    before = stats(server)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: server.infer("counts", [-0.5]), range(8)))
    after = stats(server)
    assert len({*map(tuple, answers)}) == 1
    assert after["executions"] - before["executions"] == 1
    assert (after["cache_hit"] - before["cache_hit"], after["cache_miss"] - before["cache_miss"]) == (7, 1)


def test_a_model_that_does_not_ask_for_it(server: Serving) -> None:
    for _ in range(2):
        server.infer("uncached", [1.0])
    assert stats(server, "uncached")["executions"] == 2


POLICY = """
header = "x-tenant"

[tenants.acme]
header_values = ["acme"]

[tenants.other]
header_values = ["other"]
"""


def test_tenants_have_answers_of_their_own(tmp_path: Path) -> None:
    """Unless the model says that they share them; so have the steps of an ensemble."""
    models, policy = tmp_path / "models", tmp_path / "policy.toml"
    share = 'parameters { key: "TENANTS_SHARE_CACHE" value { string_value: "true" } }'
    cached = "dynamic_batching {} response_cache { enable: true }"
    python_model(models, "apart", COUNTS, pbtxt(more=cached))
    python_model(models, "together", COUNTS, pbtxt(more=cached, parameters=share))
    ensemble(models, "steps", step("apart", "INPUT0", "OUTPUT0"))
    policy.write_text(POLICY)
    with serving(models, tmp_path / "log", LOCAL, f"--policy-file={policy}") as running:

        def ask(model: str, tenant: str) -> float:
            tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.5]}
            answer = running.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]}, x_tenant=tenant)
            value: float = json.loads(answer[2])["outputs"][0]["data"][0]
            return value

        tenants = ("acme", "other", "", "acme", "other", "")
        assert [ask("apart", tenant) for tenant in tenants] == [2.5, 3.5, 4.5] * 2
        assert [ask("steps", tenant) for tenant in tenants] == [2.5, 3.5, 4.5] * 2
        assert [ask("together", tenant) for tenant in tenants] == [2.5] * 6


CALLS = """
def execute(self, requests):
    # One call for all of them.
    total = sum(request.inputs()[0].as_numpy() for request in requests)
    call = pb_utils.InferenceRequest(
        model_name="apart", requested_output_names=["OUTPUT0"], inputs=[pb_utils.Tensor("INPUT0", total)]
    )
    tensors = call.exec().output_tensors()
    return [pb_utils.InferenceResponse(tensors) for _ in requests]
"""
THREADED = """
def execute(self, requests):
    # Nothing tells which of the requests that are open at the moment a call is for.
    import threading

    if not hasattr(self, "both"):
        self.both = threading.Barrier(2)

    def answer(request):
        self.both.wait()
        call = pb_utils.InferenceRequest(
            model_name="apart", requested_output_names=["OUTPUT0"], inputs=[pb_utils.Tensor("INPUT0", given)]
        )
        given_back = pb_utils.InferenceResponse(call.exec().output_tensors())
        self.both.wait()
        request.get_response_sender().send(given_back, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    for request in requests:
        given = request.inputs()[0].as_numpy()
        threading.Thread(target=answer, args=(request,)).start()
    return None
"""


def test_calls_for_several_tenants_answer_nobody_else(tmp_path: Path) -> None:
    """A call for a batch of several tenants, or of which nothing tells for whom it is, is computed each time."""
    models, policy = tmp_path / "models", tmp_path / "policy.toml"
    python_model(models, "apart", COUNTS, CACHED)
    batches = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 20000000 }"
    python_model(models, "calls", CALLS, pbtxt(batch=2, more=batches))
    decoupled = "model_transaction_policy { decoupled: true }"
    python_model(models, "threaded", THREADED, pbtxt(batch=1, more=decoupled))
    policy.write_text(POLICY)
    with (
        serving(models, tmp_path / "log", LOCAL, f"--policy-file={policy}") as running,
        ThreadPoolExecutor(2) as threads,
    ):

        def ask(model: str, tenant: str) -> float:
            answer = running.ask("POST", f"/v2/models/{model}/generate", {"INPUT0": 0.0}, x_tenant=tenant)
            value: float = json.loads(answer[2])["OUTPUT0"]
            return value

        def both(model: str, *tenants: str) -> list[float]:
            return sorted(threads.map(lambda tenant: ask(model, tenant), tenants))

        assert ask("apart", "acme") == ask("apart", "acme") == 1
        assert both("calls", "acme", "acme") == [1, 1], "it is acme's own"
        assert both("calls", "acme", "other") == [2, 2]
        assert both("calls", "acme", "other") == [3, 3]
        assert both("threaded", "acme", "other") == [4, 5]
        assert both("threaded", "acme", "other") == [6, 7]
        assert ask("apart", "acme") == 1
        assert ask("apart", "other") == 8


TELLS = """
import numpy as np

from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec

CODES = {"acme": 1, "other": 2, "default": 3, "": 4}


class TellsBackend:
    name = "tells"
    interface = 1

    def complete(self, context):
        tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
        tensors = {"input": [{"name": "INPUT0", **tensor}], "output": [{"name": "OUTPUT0", **tensor}]}
        return {**context.config, **tensors, "max_batch_size": 8}

    def open(self, context):
        self.model = context.name
        return self

    def instance(self, context):
        return self

    def execute(self, requests, marks):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        (given,) = request.header.inputs
        caller = request.header.caller
        told = np.frombuffer(request.data[0], np.float32) * 10 + (0 if caller is None else CODES[caller.tenant])
        header = ResponseHeader(self.model, "1", [TensorSpec("OUTPUT0", given.datatype, given.shape)])
        return InferenceResponse(header, [told.astype(np.float32).tobytes()])

    def is_ready(self):
        return True

    def close(self):
        pass
"""
CALLS_STEPS = """
def execute(self, requests):
    answers = []
    for request in requests:
        call = pb_utils.InferenceRequest(
            model_name="steps", requested_output_names=["OUTPUT0"], inputs=request.inputs()
        )
        answers.append(pb_utils.InferenceResponse(call.exec().output_tensors()))
    return answers
"""


def test_a_backend_learns_which_tenant_a_step_or_call_is_for(tmp_path: Path) -> None:
    """By this engines keep what they computed of prompts apart; also of steps that follow each other in one worker."""
    models, site, policy = tmp_path / "models", tmp_path / "site", tmp_path / "policy.toml"
    (site / "tells-1.dist-info").mkdir(parents=True)
    (site / "tells.py").write_text(TELLS)
    (site / "tells-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: tells\nVersion: 1\n")
    (site / "tells-1.dist-info/entry_points.txt").write_text("[nerite.backends]\ntells = tells:TellsBackend\n")
    for name in ("first", "second", "third"):
        (models / name / "1").mkdir(parents=True)
        worker = "" if name == "third" else 'parameters { key: "WORKER" value: { string_value: "one" } }'
        (models / name / "config.pbtxt").write_text(f'backend: "tells"\n{worker}')
    steps = (step("first", "INPUT0", "a"), step("second", "a", "b"), step("third", "b", "OUTPUT0"))
    ensemble(models, "steps", *steps)
    python_model(models, "calls", CALLS_STEPS, pbtxt(more=""))
    policy.write_text(POLICY)
    path = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [0.0]}
    with serving(models, tmp_path / "log", f"--policy-file={policy}", environment=path) as running:
        for tenant, code in (("acme", 111), ("other", 222), ("nobody", 333)):
            for model in ("steps", "calls"):
                answer = running.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]}, x_tenant=tenant)
                assert json.loads(answer[2])["outputs"][0]["data"] == [code], (model, tenant)


def test_tensors_in_shared_memory(server: Serving) -> None:
    client = InferenceServerClient(server.http)
    given = np.array([[5, 6]], np.float32)
    with region(client, "given", 8) as ours, region(client, "taken", 8) as theirs:
        tensor = InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_shared_memory("given", 8)
        output = InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("taken", 8)
        shm.set_shared_memory_region(ours, [given])
        before = stats(server)["cache_hit"]
        seen = []
        for _ in range(2):
            shm.set_shared_memory_region(theirs, [np.zeros(2, np.float32)])
            client.infer("counts", [tensor], outputs=[output])
            seen.append(shm.get_contents_as_numpy(theirs, np.float32, [2]).tolist())
    assert seen[0] == seen[1] == server.infer("counts", [5.0, 6.0]) != [0, 0]
    assert stats(server)["cache_hit"] == before + 2
    client.close()


def test_each_caller_gets_the_answer_in_the_form_that_he_asked_for(server: Serving) -> None:
    """However the caller asked for it whose answer is kept, and those who wait for the same."""
    before = stats(server)
    client, stream = InferenceServerClient(server.http), Stream(server)
    tensor = InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[-0.25]], np.float32))

    def classified() -> list[bytes]:
        outputs = [InferRequestedOutput("OUTPUT0", class_count=1)]
        return [*client.infer("counts", [tensor], outputs=outputs).as_numpy("OUTPUT0").flat]

    with region(client, "placed", 4) as theirs, ThreadPoolExecutor(1) as threads:
        output = InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("placed", 4)
        # The first writes into shared memory, the second waits for it, the others find its answer.
        looked_up = server.metrics()[LOOKUPS]
        placed = threads.submit(lambda: InferenceServerClient(server.http).infer("counts", [tensor], outputs=[output]))
        eventually(lambda: server.metrics()[LOOKUPS] > looked_up)
        stream.ask("counts", -0.25, "waits", enable_empty_final_response=True)
        placed.result()
        (value,) = shm.get_contents_as_numpy(theirs, np.float32, [1]).tolist()
    assert stream.next() == ("waits", value, True)
    assert classified() == [f"{value:f}:0".encode()]
    stream.ask("counts", -0.25, "finds")
    stream.ask("counts", -0.25, "finds, with an end", enable_empty_final_response=True)
    assert stream.next() == ("finds", value, True)
    assert stream.next() == ("finds, with an end", value, True)
    assert server.infer("counts", [-0.25]) == [value]
    after = stats(server)
    assert after["executions"] - before["executions"] == 1
    assert (after["cache_hit"] - before["cache_hit"], after["success"] - before["success"]) == (5, 6)
    stream.close()
    client.close()


def test_a_server_without_a_cache_says_so(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server:
        assert server.infer("counts", [1.0]) != server.infer("counts", [1.0])
    assert "model 'counts' enables the response cache, but the server has none" in server.text
    assert "model 'uncached' enables" not in server.text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--cache-config=local,x=1"],
            "error: creating server: Invalid argument - Failed to initialize LocalCache: config didn't contain a valid "
            "'size' field.",
        ),
        (
            ["--cache-config=redis,host=127.0.0.1", "--cache-config=redis,port=1"],
            "error: creating server: Internal - Failed to initialize RedisCache: Failed to connect to Redis "
            "(127.0.0.1:1): Connection refused",
        ),
        (
            ["--cache-config=redis,host=nowhere.invalid", "--cache-config=redis,port=1"],
            "Failed to connect to Redis (nowhere.invalid:1): ",
        ),
    ],
)
def test_no_start_without_the_cache(repository: Path, flags: list[str], said: str) -> None:
    done = subprocess.run([NERITE, "serve", repository, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr


def test_two_servers_have_one_redis(repository: Path, redis: Redis, tmp_path: Path) -> None:
    with (
        serving(repository, tmp_path / "one", *redis.flags) as one,
        serving(repository, tmp_path / "two", *redis.flags) as two,
    ):
        known(one)
        known(two)
        answer = one.infer("counts", [1.0, 2.0])
        eventually(lambda: len(redis.keys) == 1)
        assert two.infer("counts", [1.0, 2.0]) == answer
        assert stats(two)["executions"] == 0
        assert (stats(one)["cache_miss"], stats(two)["cache_hit"]) == (1, 1)
        assert one.infer("counts", [1.0, 3.0]) != [2.0, 4.0], "the second execution of the first server"
    with serving(repository, tmp_path / "three", *redis.flags) as three:
        known(three)
        assert three.infer("counts", [1.0, 2.0]) == answer, "and it is there after a restart"


def test_answers_of_other_files_are_not_taken_from_redis(redis: Redis, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for add in (1, 2, 1):
        python_model(models, "counts", adds(add), CACHED)
        with serving(models, tmp_path / "log", *redis.flags) as server:
            known(server)
            assert server.infer("counts", [1.0]) == [1.0 + add]
            eventually(lambda: len(redis.keys) >= 1)
    assert len(redis.keys) == 2


def test_what_somebody_else_has_written(repository: Path, redis: Redis, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", *redis.flags) as server:
        known(server)
        server.infer("counts", [1.0])
        eventually(lambda: len(redis.keys) == 1)
        (key,) = redis.keys
        entry = redis.ask("GET", key)
        assert isinstance(entry, bytes)
        for strange in (b"", b"nothing of ours", entry[:-1], entry + b"x"):
            redis.ask("SET", key, strange)
            server.infer("counts", [1.0])
            eventually(lambda: redis.ask("GET", key) not in (b"", strange), what="it was not replaced")  # noqa: B023
        redis.ask("DEL", key)
        redis.ask("LPUSH", key, "a list")
        server.infer("counts", [1.0])
        assert stats(server)["executions"] == 6
        eventually(lambda: server.metrics()["nerite_cache_failures"] == 5)
    assert f"ignored the value of '{key.decode()}' in Redis: it is too short" in server.text
    assert f"Redis (127.0.0.1:{redis.port}) returned an error: WRONGTYPE" in server.text


def test_redis_goes_and_comes_back(repository: Path, redis: Redis, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", *redis.flags) as server:
        known(server)
        server.infer("counts", [1.0])
        redis.stop()
        for _ in range(3):
            server.infer("counts", [1.0])
        assert stats(server)["executions"] == 4
        redis.start()
        eventually(lambda: "reconnected to Redis" in server.text, what="it did not come back")
        answer = server.infer("counts", [1.0])
        assert server.infer("counts", [1.0]) == answer
    assert f"lost the connection to Redis (127.0.0.1:{redis.port}); models compute all requests: " in server.text


def test_redis_that_does_not_answer(repository: Path, redis: Redis, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", *redis.flags, "--cache-config=redis,socket_timeout=50") as server:
        known(server)
        redis.signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(8) as threads:
                answers = list(threads.map(lambda number: server.infer("counts", [float(number)]), range(8)))
        finally:
            redis.signal(signal.SIGCONT)
        assert len(answers) == 8
        assert (stats(server)["success"], stats(server)["cache_miss"]) == (8, 8)
        eventually(lambda: "reconnected to Redis" in server.text, what="it did not come back")
    assert "models compute all requests: no answer in 50 ms" in server.text


def test_redis_that_is_full(repository: Path, tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "redis", "--maxmemory", "1") as redis,
        serving(repository, tmp_path / "log", *redis.flags) as server,
    ):
        known(server)
        for _ in range(2):
            server.infer("counts", [1.0])
        assert stats(server)["executions"] == 2
        eventually(lambda: "returned an error: OOM command not allowed" in server.text)


def test_who_may_use_redis(repository: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--requirepass", "secret") as redis:
        for wrong, said in (("", "NOAUTH"), ("wrong", "WRONGPASS")):
            command = [NERITE, "serve", repository, *redis.flags]
            environment = {**os.environ, "TRITONCACHE_REDIS_PASSWORD": wrong}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            assert (done.returncode, said in done.stderr) == (1, True)
        flags = (*redis.flags, "--cache-config=redis,password=secret", "--cache-config=redis,db=3")
        with serving(repository, tmp_path / "log", *flags) as server:
            known(server)
            assert server.infer("counts", [1.0]) == server.infer("counts", [1.0])


def test_redis_over_tls(repository: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("redis.example")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    files = {name: str(tmp_path / f"{name}.pem") for name in ("ca", "key", "cert")}
    tls = ("--tls-cert-file", files["cert"], "--tls-key-file", files["key"], "--tls-ca-cert-file", files["ca"])
    settings = {"tls_enabled": "true", "cacert": files["ca"], "cert": files["cert"], "key": files["key"]}
    with redis_server(tmp_path / "redis", "--tls-replication", "no", *tls, tls=True) as redis:
        flags = (*redis.flags, *(f"--cache-config=redis,{name}={value}" for name, value in settings.items()))
        with serving(repository, tmp_path / "log", *flags, "--cache-config=redis,sni=redis.example") as server:
            known(server)
            assert server.infer("counts", [1.0]) == server.infer("counts", [1.0])
        done = subprocess.run([NERITE, "serve", repository, *flags], capture_output=True, text=True, check=False)
        assert "certificate verify failed: IP address mismatch" in done.stderr


def known(server: Serving) -> None:
    """Wait until it is known what the models were made from: only then is their work kept in Redis."""

    def content() -> bool:
        return all("content_hash" in entry for entry in server.json("POST", "/v2/repository/index"))

    eventually(content)


STEPS = """
platform: "ensemble"
max_batch_size: 8
input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
ensemble_scheduling { step [
  { model_name: "counts" model_version: -1
    input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "X" } },
  { model_name: "adds" model_version: -1
    input_map { key: "INPUT0" value: "X" } output_map { key: "OUTPUT0" value: "OUTPUT0" } }
] }
"""


@pytest.mark.parametrize("kind", ["local", "redis"])
def test_an_ensemble_and_its_models(kind: str, redis: Redis, tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "counts", COUNTS, CACHED)
    python_model(models, "adds", adds(10))
    for name, more in (("cached", "response_cache { enable: true }"), ("plain", "")):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(STEPS + more)
    flags = [LOCAL] if kind == "local" else redis.flags
    with serving(models, tmp_path / "log", *flags, "--model-control-mode=explicit", "--load-model=*") as server:
        known(server)
        first = server.infer("cached", [1.0])
        assert [server.infer(name, [1.0]) for name in ("cached", "plain", "plain")] == [first] * 3
        assert (stats(server)["executions"], stats(server, "adds")["executions"]) == (1, 3)
        assert (stats(server, "cached")["cache_hit"], stats(server, "plain")["cache_hit"]) == (1, 0)
        python_model(models, "adds", adds(20))
        assert server.ask("POST", "/v2/repository/models/adds/load")[0] == 200
        known(server)
        assert server.infer("cached", [1.0]) == [first[0] + 10], "not what the model before has answered"
