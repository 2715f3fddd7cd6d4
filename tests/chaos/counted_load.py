"""A mixed load whose client keeps its own count of what became of each request."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException

MODEL: Final = """
def execute(self, requests):
    (request,) = requests
    value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
    kind = int(value.reshape(-1)[0])
    if kind == 1:
        raise ValueError("it was raised")
    if kind == 2:
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("it was told"))]
    if kind == 3:
        time.sleep(0.002)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)])]
"""
CONFIG: Final = """
dynamic_batching {
  default_queue_policy { default_timeout_microseconds: 10000000 allow_timeout_override: true max_queue_size: 20 }
}
"""
_CONNECTIONS: Final = 24
_SHARES: Final = {"ok": 60, "raise": 6, "tell": 6, "slow": 8, "late": 10, "hang up": 10}
_OUTCOMES: Final = {
    "it was raised": "model_error",
    "it was told": "success",  # of the server: an error is what the model had to say
    "Request timeout expired": "queue_timeout",
    "Exceeds maximum queue size": "queue_full",
}


class Client:
    """Sends requests to one model over HTTP and gRPC, and hangs up on some."""

    def __init__(self, model: str, http: str, grpc: str, seed: int) -> None:
        self.counted: Counter[str] = Counter()
        """What became of requests, under the names that the metrics have; and ``hung_up``."""
        self._model = model
        self._http = http
        self._grpc = grpc
        self._chance = random.Random(seed)

    async def send(self, count: int) -> None:
        """Send ``count`` requests, and return when each is answered or given up."""
        kinds = iter(
            self._chance.choices(["ok", "raise", "tell", "slow", "late", "hang up"], (60, 6, 6, 8, 10, 10), k=count)
        )
        async with grpcclient.InferenceServerClient(self._grpc) as client:
            await asyncio.gather(
                *(self._over_http(kinds) for _ in range(_CONNECTIONS - 4)),
                *(self._over_grpc(kinds, client) for _ in range(4)),
            )

    async def _over_http(self, kinds: Iterable[str]) -> None:
        host, port = self._http.split(":")
        streams = None
        for kind in kinds:
            if streams is None:
                streams = await asyncio.open_connection(host, int(port))
            reader, writer = streams
            writer.write(self._request(kind))
            if kind == "hang up":
                await asyncio.sleep(self._chance.choice([0, 0, 0.001, 0.005]))
                writer.close()
                await writer.wait_closed()
                streams = None
                self.counted["hung_up"] += 1
                continue
            status = int((await reader.readline()).split()[1])
            headers = {}
            while line := (await reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            self.counted["success" if status == 200 else _outcome(body["error"])] += 1
        if streams is not None:
            streams[1].close()
            await streams[1].wait_closed()

    async def _over_grpc(self, kinds: Iterable[str], client: grpcclient.InferenceServerClient) -> None:
        for kind in kinds:
            tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.array([[_VALUES.get(kind, 0)]], np.float32))
            try:
                await client.infer(self._model, [tensor], timeout=1 if kind == "late" else None)
            except InferenceServerException as error:
                self.counted[_outcome(error.message())] += 1
            else:
                self.counted["success"] += 1

    def _request(self, kind: str) -> bytes:
        tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [_VALUES.get(kind, 0)]}
        asked = {"inputs": [tensor], "parameters": {"timeout": 1} if kind == "late" else {}}
        body = json.dumps(asked).encode()
        head = f"POST /v2/models/{self._model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body


_VALUES: Final = {"raise": 1, "tell": 2, "slow": 3}


def _outcome(error: str) -> str:
    found = [outcome for text, outcome in _OUTCOMES.items() if text in error]
    assert len(found) == 1, error
    return found[0]
