"""Models that answer samples before they are ready."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from serving import IDENTITY, IN_PROCESS, NERITE, Serving, eventually, pbtxt, python_model, serving

RUNS = """
def initialize(self, args):
    self.name = args["model_instance_name"]

def execute(self, requests):
    for request in requests:
        value = float(request.inputs()[0].as_numpy().reshape(-1)[0])
        print("ran", self.name, len(requests), value, flush=True)
        while value == 7 and not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            time.sleep(0.01)
        if value == 13:
            raise ValueError("unlucky")
        if value == 9:
            os._exit(3)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""
LATE = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        print("ran", flush=True)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def sample(batch: int = 1, count: int = 1, file: str = "") -> str:
    data = f'input_data_file: "{file}"' if file else "zero_data: true"
    return f"""
model_warmup {{
  name: "first" batch_size: {batch} count: {count}
  inputs {{ key: "INPUT0" value {{ data_type: TYPE_FP32 dims: 1 {data} }} }}
}}
"""


def warm(repository: Path, name: str, value: float, **more: str) -> Path:
    """Write a model whose sample is one number."""
    folder = python_model(repository, name, RUNS, pbtxt(more="dynamic_batching {}" + sample(file="number"), **more))
    (folder / "warmup").mkdir()
    (folder / "warmup" / "number").write_bytes(np.float32(value).tobytes())
    return folder


def load(server: Serving, model: str) -> tuple[int, str]:
    status, _, body = server.ask("POST", f"/v2/repository/models/{model}/load")
    return status, body.decode()


@pytest.mark.parametrize("parameters", ["", IN_PROCESS])
def test_each_instance_runs_each_sample(tmp_path: Path, parameters: str) -> None:
    config = pbtxt(more="dynamic_batching {}" + sample(batch=3, count=2), parameters=parameters)
    python_model(tmp_path / "models", "m", RUNS, config.replace("KIND_CPU }]", "KIND_CPU count: 2 }]"))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        for number in range(2):
            assert server.text.count(f"ran m_0_{number} 3 0.0") == 6
        assert server.infer("m", [1.0]) == [1.0]
        stats = server.json("GET", "/v2/models/m/stats")["model_stats"][0]
        assert (stats["inference_count"], stats["execution_count"]) == (1, 1)


def test_a_model_is_ready_only_when_it_is_warm(tmp_path: Path) -> None:
    folder = warm(tmp_path / "models", "m", 7)
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit") as server:
        answers: list[tuple[int, str]] = []
        loading = threading.Thread(target=lambda: answers.append(load(server, "m")))
        loading.start()
        eventually(lambda: "ran m_0_0 1 7.0" in server.text)
        assert not server.ready("m")
        assert server.state("m") == "LOADING"
        (folder / "1" / "go").touch()
        loading.join()
        assert answers == [(200, "")]
        assert server.ready("m")


@pytest.mark.parametrize("parameters", ["", IN_PROCESS])
def test_a_sample_that_fails_fails_the_load(tmp_path: Path, parameters: str) -> None:
    warm(tmp_path / "models", "m", 13, parameters=parameters)
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit") as server:
        status, body = load(server, "m")
        assert status == 400
        assert "failed to run warmup sample 'first': " in body
        assert "ValueError: unlucky" in body
        eventually(lambda: server.workers() == {})
        assert not server.ready("m")


def test_a_worker_that_dies_of_a_sample(tmp_path: Path) -> None:
    warm(tmp_path / "models", "m", 9)
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit") as server:
        status, body = load(server, "m")
        assert status == 400
        assert "failed to run warmup sample 'first': Stub process 'm_0_0' is not healthy" in body
        eventually(lambda: server.workers() == {})


def test_a_reload_that_does_not_get_warm_leaves_what_was_serving(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "m", IDENTITY)
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit", "--load-model=m") as server:
        warm(tmp_path / "models", "m", 13)
        assert load(server, "m")[0] == 400
        assert server.infer("m", [1.0]) == [1.0]


def test_instances_that_come_later_are_warmed_up_too(tmp_path: Path) -> None:
    folder = warm(tmp_path / "models", "m", 1)
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit", "--load-model=m") as server:
        config = (folder / "config.pbtxt").read_text()
        (folder / "config.pbtxt").write_text(config.replace("KIND_CPU }]", "KIND_CPU count: 2 }]"))
        assert load(server, "m") == (200, "")
        assert [server.text.count(f"ran m_0_{number} 1 1.0") for number in range(2)] == [1, 1]


def test_a_decoupled_model(tmp_path: Path) -> None:
    config = pbtxt(batch=0, more="model_transaction_policy { decoupled: true }" + sample(count=2))
    python_model(tmp_path / "models", "m", LATE, config)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.ready("m")
        assert server.text.count("ran") == 2


def recorded(repository: Path, lines: str) -> Path:
    """Write a model that is warmed up by the requests in a file."""
    parameters = 'parameters { key: "WARMUP_REQUESTS" value: { string_value: "requests.jsonl" } }'
    folder = python_model(repository, "m", RUNS, pbtxt(parameters=parameters))
    (folder / "warmup").mkdir()
    (folder / "warmup" / "requests.jsonl").write_text(lines)
    return folder


def asked(value: float) -> str:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}
    return json.dumps({"inputs": [tensor]}) + "\n"


def test_recorded_requests_are_answered_by_each_instance(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "models", asked(1) + asked(2))
    config = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(config.replace("KIND_CPU }]", "KIND_CPU count: 2 }]"))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        for number in range(2):
            assert [server.text.count(f"ran m_0_{number} 1 {value}") for value in (1.0, 2.0)] == [1, 1]


def test_a_recorded_request_that_fails_fails_the_load_by_its_line(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "models", asked(1) + asked(13))
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit") as server:
        status, body = load(server, "m")
        assert status == 400
        assert "failed to run warmup sample 'requests.jsonl:2': " in body
        assert "ValueError: unlucky" in body
        (folder / "warmup" / "requests.jsonl").write_text(asked(1) + asked(2).replace("INPUT0", "INPUT"))
        status, body = load(server, "m")
        assert status == 400
        assert "The recorded request at warmup/requests.jsonl:2 is invalid." in body


def test_what_the_client_records_warms_up(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "models", "")
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit", "--load-model=m") as server:
        command = [str(NERITE), "client", "--url", server.http, "infer", "m", "--record"]
        for value in (1.5, 13):
            subprocess.run([*command, str(folder / "warmup" / "requests.jsonl"), f"INPUT0={value}"], check=False)
        assert load(server, "m") == (200, "")
        assert server.text.count("ran m_0_0 1 1.5") == 2
        assert server.text.count("ran m_0_0 1 13.0") == 1


SEQUENCES = """
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
  state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""
SUMS = """
def execute(self, requests):
    answers = []
    for request in requests:
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        print("ran", *(given[name].item() for name in ("INPUT0", "START", "ID", "BEFORE")), flush=True)
        total = given["INPUT0"] + given["BEFORE"]
        outputs = [pb_utils.Tensor("AFTER", total)]
        if 0 < total.item() < 3 and ITERATIVE:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        else:
            outputs.append(pb_utils.Tensor("OUTPUT0", total))
        answers.append(pb_utils.InferenceResponse(outputs))
    return answers
"""


def runs(server: Serving) -> list[str]:
    """What the model printed, in order."""
    return re.findall(r"\bran ([-0-9. ]+)", server.text)


@pytest.mark.parametrize("parameters", ["", IN_PROCESS])
def test_samples_of_a_model_with_sequences(tmp_path: Path, parameters: str) -> None:
    config = pbtxt(more=SEQUENCES + sample(batch=2, count=2), parameters=parameters)
    python_model(tmp_path / "models", "m", SUMS.replace("ITERATIVE", "False"), config)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert runs(server) == ["0.0 1.0 1 0.0", "0.0 1.0 2 0.0"] * 2
        assert server.json("GET", "/v2/models/m/stats")["model_stats"][0]["inference_count"] == 0


@pytest.mark.parametrize("parameters", ["", IN_PROCESS])
def test_a_sample_runs_as_often_as_an_iterative_model_wants(tmp_path: Path, parameters: str) -> None:
    more = SEQUENCES.replace("{", "{ iterative_sequence: true", 1) + sample(file="number")
    folder = python_model(
        tmp_path / "models", "m", SUMS.replace("ITERATIVE", "True"), pbtxt(more=more, parameters=parameters)
    )
    (folder / "warmup").mkdir()
    (folder / "warmup" / "number").write_bytes(np.float32(1).tobytes())
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert runs(server) == ["1.0 1.0 1 0.0", "1.0 0.0 1 1.0", "1.0 0.0 1 2.0"]


def test_recorded_requests_are_one_sequence_if_they_were(tmp_path: Path) -> None:
    said = [{"sequence_id": 7, "sequence_start": True}, {"sequence_id": 7, "sequence_end": True}, {}]
    lines = [{**json.loads(asked(2)), "parameters": parameters} for parameters in said]
    recorded(tmp_path / "models", "\n".join(map(json.dumps, lines)))
    parameter = 'parameters { key: "WARMUP_REQUESTS" value: { string_value: "requests.jsonl" } }'
    python_model(tmp_path / "models", "m", SUMS.replace("ITERATIVE", "False"), pbtxt(more=SEQUENCES + parameter))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert runs(server) == ["2.0 1.0 7 0.0", "2.0 0.0 7 2.0", "2.0 1.0 1 0.0"]
