"""Clients that block: for one model each, over HTTP or gRPC; with futures; and for models that answer with streams."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar

from nerite.core.tensor import Array
from nerite.pytriton.client.base import BaseModelClient, ReadinessWait, StreamPart, library, translated
from nerite.pytriton.client.calls import DEFAULT_INFERENCE_SECONDS, Parameters, ServerAddress, results_of
from nerite.pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientQueueFullError,
    PyTritonClientTimeoutError,
)
from nerite.pytriton.decorators import TritonModelConfig

_T = TypeVar("_T")


class ModelClient(BaseModelClient):
    """Client of one model over HTTP or gRPC (``grpc://``). For one thread; a context manager."""

    _counterpart = "DecoupledModelClient with grpc://"

    def __init__(self, url: str, model_name: str, model_version: str | None = None, **settings: Any) -> None:
        super().__init__(url, model_name, model_version, **settings)
        self._client = self.create_client_from_url(url, self._seconds)
        if not self._lazy:
            self._ready()

    @classmethod
    def from_existing_client(cls, existing_client: BaseModelClient) -> Self:
        """Return a client of the same model, with the configuration that the other one has read."""
        return cls(
            existing_client._url,
            existing_client._model,
            existing_client._version or None,
            init_timeout_s=existing_client._init_seconds,
            inference_timeout_s=existing_client._seconds,
            model_config=existing_client._config,
            access_token=existing_client._token,
        )

    def create_client_from_url(self, url: str, network_timeout_s: float | None = None) -> Any:
        """Return a client of ``tritonclient``."""
        address = ServerAddress.parse(url)
        lib = library(address.protocol)
        if address.protocol == "grpc":
            return lib.InferenceServerClient(address.authority, ssl=address.secure)
        seconds = network_timeout_s or DEFAULT_INFERENCE_SECONDS
        return lib.InferenceServerClient(
            address.authority, ssl=address.secure, connection_timeout=seconds, network_timeout=seconds
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            self._client.close()

    def wait_for_server(self, timeout_s: float) -> None:
        """Wait until the server is ready. Raises ``PyTritonClientTimeoutError``."""
        self._wait(lambda: bool(self._client.is_server_ready(headers=self._headers())), "The server", timeout_s)

    def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready. Raises ``PyTritonClientTimeoutError``."""

        def ready() -> bool:
            return bool(self._client.is_model_ready(self._model, self._version, headers=self._headers()))

        self._wait(ready, f"Model {self._model}", timeout_s)

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        self._check_open()
        wait = ReadinessWait(what, timeout_s)
        while True:
            with wait.attempt():
                if ready():
                    return
            time.sleep(wait.pause())

    @property
    def model_config(self) -> TritonModelConfig:
        """The configuration of the model. Waits for the model at first."""
        return self._ready()

    @property
    def is_batching_supported(self) -> bool:
        """Whether the model has a batch dimension."""
        return self._ready().batching

    def load_model(self, config: str | None = None, files: dict[str, Any] | None = None) -> None:
        """Load or reload the model."""
        with translated():
            self._client.load_model(self._model, headers=self._headers(), config=config, files=files)

    def unload_model(self) -> None:
        """Unload the model."""
        with translated():
            self._client.unload_model(self._model, headers=self._headers())

    def _ready(self) -> TritonModelConfig:
        self._check_open()
        if self._config is not None:
            return self._config
        (self.wait_for_model if self._ensure else self.wait_for_server)(self._init_seconds)
        with translated():
            document = self._client.get_model_config(**self._config_arguments())
        return self._take_config(document)

    def _infer(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, *, sample: bool
    ) -> Any:
        config = self._ready()
        arguments = self._arguments(config, inputs, by_name, parameters, sample=sample)
        if self._address.protocol == "grpc":
            arguments["client_timeout"] = self._seconds
        with translated():
            result = self._client.infer(**arguments, headers=self._headers(headers))
        return results_of(config, result, sample=sample)


class DecoupledModelClient(ModelClient):
    """Client of a model that answers with streams; gRPC only. ``infer_sample`` and ``infer_batch`` are generators."""

    _streams = True
    _counterpart = "ModelClient"

    def _infer(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, *, sample: bool
    ) -> Iterator[dict[str, Array]]:
        config = self._ready()
        arguments = self._arguments(config, inputs, by_name, parameters, sample=sample)
        responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        with translated():
            self._client.start_stream(
                lambda result, error: responses.put((result, error)), headers=self._headers(headers)
            )
        try:
            with translated():
                self._client.async_stream_infer(**arguments, enable_empty_final_response=True)
                while True:
                    try:
                        result, error = responses.get(timeout=self._seconds)
                    except queue.Empty:
                        raise PyTritonClientTimeoutError(
                            f"No response of {self._model} within {self._seconds:g} s."
                        ) from None
                    part = StreamPart(config, result, error, sample=sample)
                    if part.outputs is not None:
                        yield part.outputs
                    if part.final:
                        return
        finally:
            with suppress(Exception):  # the stream is over, however it ended
                self._client.stop_stream(cancel_requests=True)


class FuturesModelClient:
    """Client of one model whose calls return futures; each of its threads has a connection. A context manager."""

    def __init__(
        self,
        url: str,
        model_name: str,
        model_version: str | None = None,
        *,
        max_workers: int = 128,
        max_queue_size: int = 128,
        non_blocking: bool = False,
        init_timeout_s: float | None = None,
        inference_timeout_s: float | None = None,
        access_token: str | None = None,
    ) -> None:
        """``non_blocking``: a call raises ``PyTritonClientQueueFullError`` instead of waiting for room."""
        self._new: Callable[[], ModelClient] = lambda: ModelClient(
            url,
            model_name,
            model_version,
            init_timeout_s=init_timeout_s,
            inference_timeout_s=inference_timeout_s,
            access_token=access_token,
        )
        ServerAddress.parse(url)
        self._room = threading.BoundedSemaphore(max_workers + max_queue_size)
        self._blocking = not non_blocking
        self._threads = ThreadPoolExecutor(max_workers, "pytriton")
        self._mine = threading.local()
        self._clients: list[ModelClient] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, wait: bool = True) -> None:
        """Close all connections, after the calls in progress unless ``wait`` is False. Idempotent."""
        if not self._closed:
            self._closed = True
            self._threads.shutdown(wait=wait, cancel_futures=not wait)
            with self._lock:
                clients, self._clients = self._clients, []
            for client in clients:
                with suppress(Exception):  # a thread may use it still, if we do not wait
                    client.close()

    def wait_for_model(self, timeout_s: float) -> Future[None]:
        """Return a future that is done when the model is ready."""
        return self._submit(lambda client: client.wait_for_model(timeout_s))

    def model_config(self) -> Future[TritonModelConfig]:
        """Return a future of the configuration of the model."""
        return self._submit(lambda client: client.model_config)

    def infer_sample(self, *inputs: Any, **more: Any) -> Future[dict[str, Array]]:
        """Return a future of what ``ModelClient.infer_sample`` returns."""
        return self._submit(lambda client: client.infer_sample(*inputs, **more))

    def infer_batch(self, *inputs: Any, **more: Any) -> Future[dict[str, Array]]:
        """Return a future of what ``ModelClient.infer_batch`` returns."""
        return self._submit(lambda client: client.infer_batch(*inputs, **more))

    def _submit(self, call: Callable[[ModelClient], _T]) -> Future[_T]:
        if self._closed:
            raise PyTritonClientClosedError("This client was closed: create another one.")
        if not self._room.acquire(blocking=self._blocking):
            raise PyTritonClientQueueFullError("The queue of this client is full: raise max_queue_size, or send less.")
        try:
            future = self._threads.submit(lambda: call(self._client()))
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _client(self) -> ModelClient:
        client: ModelClient | None = getattr(self._mine, "client", None)
        if client is None:
            with self._lock:
                first = self._clients[0] if self._clients else None
                client = self._mine.client = self._new() if first is None else ModelClient.from_existing_client(first)
                self._clients.append(client)
        return client
