"""Clients that block: for one model each, over HTTP or gRPC; with futures; and for models that answer with streams."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Self, TypeVar

from nerite.core.tensor import Array
from nerite.pytriton.client.calls import (
    DEFAULT_INFERENCE_SECONDS,
    DEFAULT_INIT_SECONDS,
    Parameters,
    ServerAddress,
    batched_inputs,
    checked_parameters,
    headers_of,
    read_config,
    results_of,
)
from nerite.pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelUnavailableError,
    PyTritonClientQueueFullError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from nerite.pytriton.decorators import TritonModelConfig

_T = TypeVar("_T")
_PAUSE: Final = 0.1


def library(name: str) -> ModuleType:
    """Return a module of ``tritonclient``. Raises ``PyTritonClientError`` if it is not installed."""
    try:
        return import_module(f"tritonclient.{name}")
    except ImportError as error:
        raise PyTritonClientError(
            f"tritonclient is not installed ({error}). Install it: pip install 'nerite[pytriton]'"
        ) from None


def as_client_error(error: Exception) -> PyTritonClientError:
    """Return the exception of this package for one of ``tritonclient`` or of the network."""
    text = str(error)
    status = str(getattr(error, "status", lambda: "")() or "")
    if isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in status or "timed out" in text:
        return PyTritonClientTimeoutError(f"The server has not answered in time: {text}")
    return PyTritonClientInferenceServerError(text)


@contextmanager
def translated() -> Iterator[None]:
    """Raise exceptions of this package in place of those of ``tritonclient`` and of the network."""
    try:
        yield
    except (PyTritonClientError, GeneratorExit):
        raise
    except Exception as error:
        raise as_client_error(error) from error


class BaseModelClient:
    """Address, model and time limits of a client."""

    def __init__(
        self,
        url: str,
        model_name: str,
        model_version: str | None = None,
        *,
        lazy_init: bool = True,
        init_timeout_s: float | None = None,
        inference_timeout_s: float | None = None,
        model_config: TritonModelConfig | None = None,
        ensure_model_is_ready: bool = True,
        access_token: str | None = None,
    ) -> None:
        """Raises ``PyTritonClientInvalidUrlError`` and ``PyTritonClientValueError``."""
        self._address = ServerAddress.parse(url)
        if not isinstance(model_name, str) or not model_name:
            raise PyTritonClientValueError(f"model_name is {model_name!r}: it must be the name of a model.")
        for name, value in (("init_timeout_s", init_timeout_s), ("inference_timeout_s", inference_timeout_s)):
            if value is not None and not value > 0:
                raise PyTritonClientValueError(f"{name} is {value}: it must be more than 0.")
        self._url = url
        self._model = model_name
        self._version = str(model_version or "")
        self._init_seconds = DEFAULT_INIT_SECONDS if init_timeout_s is None else init_timeout_s
        self._seconds = DEFAULT_INFERENCE_SECONDS if inference_timeout_s is None else inference_timeout_s
        self._config = model_config
        self._ensure = ensure_model_is_ready
        self._token = access_token
        self._closed = False

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self._model

    @property
    def model_version(self) -> str | None:
        """Version of the model, if one was named."""
        return self._version or None

    def _check_open(self) -> None:
        if self._closed:
            raise PyTritonClientClosedError("This client was closed: create another one.")

    def _arguments(self, lib: ModuleType, arrays: Mapping[str, Array]) -> tuple[list[Any], list[Any]]:
        """Return inputs and outputs as ``tritonclient`` takes them."""
        assert self._config is not None
        to_name = library("utils").np_to_triton_dtype
        inputs = []
        for name, array in arrays.items():
            tensor = lib.InferInput(name, list(array.shape), to_name(array.dtype))
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        return inputs, [lib.InferRequestedOutput(str(each.name)) for each in self._config.outputs]


class ModelClient(BaseModelClient):
    """Client of one model over HTTP or gRPC (``grpc://``). For one thread; a context manager."""

    def __init__(self, url: str, model_name: str, model_version: str | None = None, **settings: Any) -> None:
        super().__init__(url, model_name, model_version, **settings)
        self._lib = library(self._address.protocol)
        self._client = self.create_client_from_url(url, self._seconds)
        if not settings.get("lazy_init", True):
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
        self._wait(lambda: bool(self._client.is_server_ready(headers=self._headers())), timeout_s, "The server is")

    def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready. Raises ``PyTritonClientTimeoutError``."""
        what = f"Model {self._model} is"
        self._wait(
            lambda: bool(self._client.is_model_ready(self._model, self._version, headers=self._headers())),
            timeout_s,
            what,
        )

    def _wait(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        self._check_open()
        deadline = time.monotonic() + timeout_s
        reason = ""
        while True:
            try:
                if ready():
                    return
            except Exception as error:  # nothing listens there yet
                reason = f" ({error})"
            if time.monotonic() >= deadline:
                raise PyTritonClientTimeoutError(f"{what} not ready within {timeout_s:g} s{reason}.")
            time.sleep(_PAUSE)

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

    def infer_sample(
        self, *inputs: Any, parameters: Parameters | None = None, headers: Parameters | None = None, **named_inputs: Any
    ) -> Any:
        """Send inputs without a batch dimension; return outputs without one, by name."""
        return self._infer(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self, *inputs: Any, parameters: Parameters | None = None, headers: Parameters | None = None, **named_inputs: Any
    ) -> Any:
        """Send a batch; return the outputs by name."""
        return self._infer(inputs, named_inputs, parameters, headers, sample=False)

    def _ready(self) -> TritonModelConfig:
        self._check_open()
        if self._config is None:
            self._wait_until_known()
            with translated():
                document = self._client.get_model_config(self._model, self._version, **self._as_json())
            self._config = read_config(document.get("config", document))
            self._check_kind(self._config)
        return self._config

    def _wait_until_known(self) -> None:
        self.wait_for_server(self._init_seconds) if not self._ensure else self.wait_for_model(self._init_seconds)

    def _check_kind(self, config: TritonModelConfig) -> None:
        if config.decoupled:
            raise PyTritonClientModelUnavailableError(
                f"Model {self._model} answers with streams: use DecoupledModelClient with grpc://."
            )

    def _as_json(self) -> dict[str, Any]:
        grpc = {"as_json": True} if self._address.protocol == "grpc" else {}
        return {"headers": self._headers(), **grpc}

    def _headers(self, more: Parameters | None = None) -> dict[str, str]:
        return headers_of(self._address, more, self._token)

    def _infer(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, *, sample: bool
    ) -> Any:
        config = self._ready()
        arrays = batched_inputs(config, inputs, by_name, sample=sample)
        sent, outputs = self._arguments(self._lib, arrays)
        limit = {"client_timeout": self._seconds} if self._address.protocol == "grpc" else {}
        with translated():
            result = self._client.infer(
                self._model,
                sent,
                model_version=self._version,
                outputs=outputs,
                headers=self._headers(headers),
                parameters=checked_parameters(parameters) or None,
                **limit,
            )
        return results_of(config, result, sample=sample)


class DecoupledModelClient(ModelClient):
    """Client of a model that answers with streams; gRPC only. ``infer_sample`` and ``infer_batch`` are generators."""

    def __init__(self, url: str, model_name: str, model_version: str | None = None, **settings: Any) -> None:
        super().__init__(url, model_name, model_version, **settings)
        if self._address.protocol != "grpc":
            raise PyTritonClientValueError(f"Streams need gRPC: grpc://{self._address.host}:8001 in place of {url}.")

    def _check_kind(self, config: TritonModelConfig) -> None:
        if not config.decoupled:
            raise PyTritonClientModelUnavailableError(f"Model {self._model} answers once: use ModelClient.")

    def _infer(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, *, sample: bool
    ) -> Iterator[dict[str, Array]]:
        config = self._ready()
        arrays = batched_inputs(config, inputs, by_name, sample=sample)
        sent, outputs = self._arguments(self._lib, arrays)
        checked = checked_parameters(parameters)
        responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        with translated():
            self._client.start_stream(
                lambda result, error: responses.put((result, error)), headers=self._headers(headers)
            )
        try:
            with translated():
                self._client.async_stream_infer(
                    self._model,
                    sent,
                    model_version=self._version,
                    outputs=outputs,
                    parameters=checked or None,
                    enable_empty_final_response=True,
                )
                while True:
                    try:
                        result, error = responses.get(timeout=self._seconds)
                    except queue.Empty:
                        raise PyTritonClientTimeoutError(
                            f"No response of {self._model} within {self._seconds:g} s."
                        ) from None
                    if error is not None:
                        raise error
                    response = result.get_response()
                    if response.outputs:
                        yield results_of(config, result, sample=sample)
                    if is_final(response):
                        return
        finally:
            with suppress(Exception):  # the stream is over, however it ended
                self._client.stop_stream(cancel_requests=True)


def is_final(response: Any) -> bool:
    """Return whether a gRPC response is the last of its request."""
    parameter = response.parameters.get("triton_final_response")
    return bool(parameter is not None and parameter.bool_param)


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
