"""A client's gRPC stream, for tests that look at what comes on it, in order."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from serving import Serving


class Stream:
    """A client's stream; ``next`` is what came, an array or an error."""

    def __init__(self, server: Serving, **options: Any) -> None:
        self.came: queue.Queue[tuple[grpcclient.InferResult | None, InferenceServerException | None]] = queue.Queue()
        self.client = grpcclient.InferenceServerClient(server.grpc)
        self.client.start_stream(lambda result, error: self.came.put((result, error)), **options)

    def ask(self, model: str, value: float, request_id: str = "", **options: Any) -> None:
        tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[value]], np.float32))
        self.client.async_stream_infer(model, [tensor], request_id=request_id, **options)

    def next(self) -> Any:
        result, error = self.came.get(timeout=20)
        if error is not None:
            return str(error)
        assert result is not None
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        array = result.as_numpy("OUTPUT0")
        return response.id, None if array is None else float(array.reshape(-1)[0]), final

    def close(self) -> None:
        self.client.stop_stream()
        self.client.close()
