"""What blocking and asynchronous clients share: settings, arguments of calls, and what becomes of errors. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Final

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
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from nerite.pytriton.decorators import TritonModelConfig

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


class ReadinessWait:
    """Time within which a server or a model has to become ready."""

    def __init__(self, what: str, timeout_s: float) -> None:
        self._what = what
        self._seconds = timeout_s
        self._until = time.monotonic() + timeout_s
        self._reason = ""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Ask once. An error is no reason to stop: nothing may listen there yet."""
        try:
            yield
        except Exception as error:
            self._reason = f" ({error})"

    def pause(self) -> float:
        """Return the seconds until the next attempt. Raises ``PyTritonClientTimeoutError`` if there is none."""
        if time.monotonic() >= self._until:
            raise PyTritonClientTimeoutError(f"{self._what} is not ready within {self._seconds:g} s{self._reason}.")
        return _PAUSE


class BaseModelClient:
    """A client without connections."""

    _streams: ClassVar = False
    """Whether the model answers with streams."""
    _counterpart: ClassVar = ""
    """The client for the other kind of model."""

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
        if self._streams and self._address.protocol != "grpc":
            raise PyTritonClientValueError(f"Streams need gRPC: grpc://{self._address.host}:8001 in place of {url}.")
        self._url = url
        self._model = model_name
        self._version = str(model_version or "")
        self._lazy = lazy_init
        self._init_seconds = DEFAULT_INIT_SECONDS if init_timeout_s is None else init_timeout_s
        self._seconds = DEFAULT_INFERENCE_SECONDS if inference_timeout_s is None else inference_timeout_s
        self._config = model_config
        self._ensure = ensure_model_is_ready
        self._token = access_token
        self._closed = False
        self._lib = library(self._address.protocol)

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self._model

    @property
    def model_version(self) -> str | None:
        """Version of the model, if one was named."""
        return self._version or None

    def infer_sample(
        self, *inputs: Any, parameters: Parameters | None = None, headers: Parameters | None = None, **named_inputs: Any
    ) -> Any:
        """Send inputs without a batch dimension. The result has the outputs without one, by name."""
        return self._infer(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self, *inputs: Any, parameters: Parameters | None = None, headers: Parameters | None = None, **named_inputs: Any
    ) -> Any:
        """Send a batch. The result has the outputs by name."""
        return self._infer(inputs, named_inputs, parameters, headers, sample=False)

    def _infer(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, *, sample: bool
    ) -> Any:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closed:
            raise PyTritonClientClosedError("This client was closed: create another one.")

    def _headers(self, more: Parameters | None = None) -> dict[str, str]:
        return headers_of(self._address, more, self._token)

    def _config_arguments(self) -> dict[str, Any]:
        """Return how ``tritonclient`` is asked for the configuration."""
        grpc = {"as_json": True} if self._address.protocol == "grpc" else {}
        return {"model_name": self._model, "model_version": self._version, "headers": self._headers(), **grpc}

    def _take_config(self, document: Mapping[str, Any]) -> TritonModelConfig:
        """Keep the configuration of the model. Raises ``PyTritonClientModelUnavailableError`` for the other kind."""
        config = read_config(document.get("config", document))
        if config.decoupled != self._streams:
            answers = "answers with streams" if config.decoupled else "answers once"
            raise PyTritonClientModelUnavailableError(f"Model {self._model} {answers}: use {self._counterpart}.")
        self._config = config
        return config

    def _arguments(
        self, config: TritonModelConfig, inputs: Any, by_name: Any, parameters: Parameters | None, *, sample: bool
    ) -> dict[str, Any]:
        """Return how ``tritonclient`` is asked for an inference. Raises ``PyTritonClientValueError``."""
        to_name = library("utils").np_to_triton_dtype
        tensors = []
        for name, array in batched_inputs(config, inputs, by_name, sample=sample).items():
            tensor = self._lib.InferInput(name, list(array.shape), to_name(array.dtype))
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        return {
            "model_name": self._model,
            "inputs": tensors,
            "model_version": self._version,
            "outputs": [self._lib.InferRequestedOutput(str(each.name)) for each in config.outputs],
            "parameters": checked_parameters(parameters) or None,
        }


class StreamPart:
    """One response of a stream."""

    def __init__(self, config: TritonModelConfig, result: Any, error: Exception | None, *, sample: bool) -> None:
        """Raises ``error``, if there is one."""
        if error is not None:
            raise error
        response = result.get_response()
        self.outputs: dict[str, Array] | None = results_of(config, result, sample=sample) if response.outputs else None
        parameter = response.parameters.get("triton_final_response")
        self.final = bool(parameter is not None and parameter.bool_param)
