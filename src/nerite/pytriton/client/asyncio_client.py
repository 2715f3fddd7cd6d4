"""Clients for event loops, over ``tritonclient``'s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Self

from nerite.core.tensor import Array
from nerite.pytriton.client.calls import (
    Parameters,
    batched_inputs,
    checked_parameters,
    headers_of,
    read_config,
    results_of,
)
from nerite.pytriton.client.client import BaseModelClient, is_final, library, translated
from nerite.pytriton.client.exceptions import (
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from nerite.pytriton.decorators import TritonModelConfig

_PAUSE: Final = 0.1


class AsyncioModelClient(BaseModelClient):
    """Client of one model over HTTP or gRPC (``grpc://``), for coroutines. An asynchronous context manager."""

    def __init__(self, url: str, model_name: str, model_version: str | None = None, **settings: Any) -> None:
        super().__init__(url, model_name, model_version, **settings)
        self._lazy = settings.get("lazy_init", True)
        self._lib = library(self._address.protocol)
        self._aio = library(f"{self._address.protocol}.aio")
        self._client: Any = None

    async def __aenter__(self) -> Self:
        if not self._lazy:
            await self._ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._client is not None:
                await self._client.close()

    async def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready. Raises ``PyTritonClientTimeoutError``."""
        client = self._open()
        await self._wait(lambda: client.is_model_ready(self._model, self._version, headers=self._headers()), timeout_s)

    async def _wait(self, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        reason = ""
        while True:
            try:
                if await ready():
                    return
            except Exception as error:  # nothing listens there yet
                reason = f" ({error})"
            if time.monotonic() >= deadline:
                raise PyTritonClientTimeoutError(f"Model {self._model} is not ready within {timeout_s:g} s{reason}.")
            await asyncio.sleep(_PAUSE)

    @property
    async def model_config(self) -> TritonModelConfig:
        """The configuration of the model. Waits for the model at first."""
        return await self._ready()

    def infer_sample(
        self, *inputs: Any, parameters: Parameters | None = None, headers: Parameters | None = None, **named_inputs: Any
    ) -> Any:
        """Send inputs without a batch dimension; the result has the outputs without one, by name."""
        return self._infer(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self, *inputs: Any, parameters: Parameters | None = None, headers: Parameters | None = None, **named_inputs: Any
    ) -> Any:
        """Send a batch; the result has the outputs by name."""
        return self._infer(inputs, named_inputs, parameters, headers, sample=False)

    def _open(self) -> Any:
        self._check_open()
        if self._client is None:  # it belongs to the event loop that runs
            self._client = self._aio.InferenceServerClient(self._address.authority, ssl=self._address.secure)
        return self._client

    def _headers(self, more: Parameters | None = None) -> dict[str, str]:
        return headers_of(self._address, more, self._token)

    async def _ready(self) -> TritonModelConfig:
        client = self._open()
        if self._config is None:
            if self._ensure:
                await self.wait_for_model(self._init_seconds)
            grpc = {"as_json": True} if self._address.protocol == "grpc" else {}
            with translated():
                document = await client.get_model_config(self._model, self._version, headers=self._headers(), **grpc)
            self._config = read_config(document.get("config", document))
            self._check_kind(self._config)
        return self._config

    def _check_kind(self, config: TritonModelConfig) -> None:
        if config.decoupled:
            raise PyTritonClientModelUnavailableError(
                f"Model {self._model} answers with streams: use AsyncioDecoupledModelClient with grpc://."
            )

    def _infer(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, *, sample: bool
    ) -> Any:
        return self._ask(inputs, by_name, parameters, headers, sample)

    async def _ask(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, sample: bool
    ) -> dict[str, Array]:
        config = await self._ready()
        sent, outputs = self._arguments(self._lib, batched_inputs(config, inputs, by_name, sample=sample))
        with translated():
            async with asyncio.timeout(self._seconds):
                result = await self._client.infer(
                    self._model,
                    sent,
                    model_version=self._version,
                    outputs=outputs,
                    headers=self._headers(headers),
                    parameters=checked_parameters(parameters) or None,
                )
        return results_of(config, result, sample=sample)


class AsyncioDecoupledModelClient(AsyncioModelClient):
    """Client of a model that answers with streams; gRPC only. The calls are asynchronous generators."""

    def __init__(self, url: str, model_name: str, model_version: str | None = None, **settings: Any) -> None:
        super().__init__(url, model_name, model_version, **settings)
        if self._address.protocol != "grpc":
            raise PyTritonClientValueError(f"Streams need gRPC: grpc://{self._address.host}:8001 in place of {url}.")

    def _check_kind(self, config: TritonModelConfig) -> None:
        if not config.decoupled:
            raise PyTritonClientModelUnavailableError(f"Model {self._model} answers once: use AsyncioModelClient.")

    def _infer(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, *, sample: bool
    ) -> Any:
        return self._parts(inputs, by_name, parameters, headers, sample)

    async def _parts(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, sample: bool
    ) -> AsyncIterator[dict[str, Array]]:
        config = await self._ready()
        sent, outputs = self._arguments(self._lib, batched_inputs(config, inputs, by_name, sample=sample))
        request = {
            "model_name": self._model,
            "inputs": sent,
            "model_version": self._version,
            "outputs": outputs,
            "parameters": checked_parameters(parameters) or None,
            "enable_empty_final_response": True,
        }

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield request

        with translated():
            responses = self._client.stream_infer(requests(), headers=self._headers(headers))
            async for result, error in responses:
                if error is not None:
                    raise error
                response = result.get_response()
                if response.outputs:
                    yield results_of(config, result, sample=sample)
                if is_final(response):
                    return
