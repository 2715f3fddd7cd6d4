"""SIGTERM while clients ask without a pause: what was executed is answered, and what is not was clearly refused."""

from __future__ import annotations

import http.client
import itertools
import json
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from nerite.wire.grpc_service import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from serving import PATIENCE, Serving, eventually, pbtxt, python_model, serving

NOTES = """
def initialize(self, args):
    self.executed = open("EXECUTED", "a", buffering=1)

def execute(self, requests):
    answers = []
    for request in requests:
        value = request.inputs()[0].as_numpy()
        self.executed.write(f"{int(value.flat[0])}\\n")
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
    time.sleep(0.002)
    return answers
"""
SEVERAL = """
def initialize(self, args):
    self.executed = open("EXECUTED", "a", buffering=1)

def execute(self, requests):
    (request,) = requests
    value = request.inputs()[0].as_numpy()
    self.executed.write(f"{int(value.flat[0])}\\n")
    sender = request.get_response_sender()
    for _ in range(3):
        time.sleep(0.001)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENOUGH = 300
"""Answers before the signal."""
STOPPING = ("Server is stopping", "shutting down", "Connection refused", "failed to connect", "Socket closed")


class Load:
    """Clients of a server, each of which goes on until it is refused."""

    def __init__(self, server: Serving) -> None:
        self.answered: set[int] = set()
        self.wrong: list[str] = []
        self.refused: list[str] = []
        self._server = server
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []

    def start(self, client: Callable[[], None], count: int) -> None:
        for _ in range(count):
            self._threads.append(threading.Thread(target=self._run, args=(client,)))
            self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _run(self, client: Callable[[], None]) -> None:
        try:
            client()
        except Exception as error:  # whatever it is, the test is to tell of it
            self.wrong.append(f"{client.__name__}: {''.join(traceback.format_exception(error))}")

    def kept_alive(self) -> None:
        """Ask over one connection for as long as the server keeps it, and then over another."""
        host, port = self._server.http.split(":")
        while True:
            connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
            try:
                connection.connect()
            except ConnectionRefusedError:
                return
            kept = True
            while kept:
                number = next(self._numbers)
                tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [number]}
                connection.request("POST", "/v2/models/notes/infer", json.dumps({"inputs": [tensor]}))
                answer = connection.getresponse()
                kept = not answer.will_close
                data = json.loads(answer.read())
                if answer.status == 503:
                    self.refused.append(data["error"])
                else:
                    assert data["outputs"][0]["data"] == [number], data
                    self.answered.add(number)
            connection.close()

    def calls(self) -> None:
        """Ask by single gRPC calls."""
        with grpc.insecure_channel(self._server.grpc) as channel:
            ask = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=ModelInferRequest.SerializeToString,
                response_deserializer=ModelInferResponse.FromString,
            )
            while True:
                number, request = self._request("notes")
                try:
                    answer = ask(request, timeout=PATIENCE)
                except grpc.RpcError as error:
                    assert error.code() == grpc.StatusCode.UNAVAILABLE, error
                    self.refused.append(error.details())
                    return
                assert answer.raw_output_contents[0] == number.to_bytes(4, "little")
                self.answered.add(number)

    def stream(self) -> None:
        """Ask on a gRPC stream, and take several responses to each request."""
        with grpc.insecure_channel(self._server.grpc) as channel:
            stream = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=ModelInferRequest.SerializeToString,
                response_deserializer=ModelStreamInferResponse.FromString,
            )
            turn = threading.Semaphore()
            over = threading.Event()
            asked: list[int] = []

            def requests() -> Any:
                while turn.acquire() and not over.is_set():
                    number, request = self._request("several")
                    asked.append(number)
                    yield request

            responses = 0
            try:
                for each in stream(requests(), timeout=PATIENCE):
                    assert not each.error_message, each.error_message
                    assert each.infer_response.raw_output_contents[0] == asked[-1].to_bytes(4, "little")
                    responses += 1
                    if responses == 3:
                        responses = 0
                        self.answered.add(asked[-1])
                        turn.release()
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE, error
                assert not responses, f"after {responses} of 3: {error}"
                self.refused.append(error.details())
            finally:
                over.set()
                turn.release()

    def _request(self, model: str) -> tuple[int, Any]:
        number = next(self._numbers)
        request = ModelInferRequest(model_name=model)
        request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 1])
        request.raw_input_contents.append(number.to_bytes(4, "little"))
        return number, request


def test_sigterm(tmp_path: Path) -> None:
    executed = tmp_path / "executed"
    decoupled = "model_transaction_policy { decoupled: true }"
    for name, source, config in (
        ("notes", NOTES, pbtxt(datatype="TYPE_INT32")),
        ("several", SEVERAL, pbtxt(batch=1, more=decoupled, datatype="TYPE_INT32")),
    ):
        python_model(tmp_path / "models", name, source.replace("EXECUTED", str(executed)), config)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        load = Load(server)
        load.start(load.kept_alive, 12)
        load.start(load.calls, 4)
        load.start(load.stream, 3)
        eventually(lambda: len(load.answered) > ENOUGH or bool(load.wrong))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        load.join()
    assert load.wrong == []
    ran = {int(line) for line in executed.read_text().splitlines()}
    assert ran == load.answered
    assert all(any(part in told for part in STOPPING) for told in load.refused), load.refused
