"""Clients for event loops, over ``tritonclient``'s."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

from nerite.core.tensor import Array
from nerite.pytriton.client.base import BaseModelClient, ReadinessWait, StreamPart, library, translated
from nerite.pytriton.client.calls import Parameters, results_of
from nerite.pytriton.decorators import TritonModelConfig


class AsyncioModelClient(BaseModelClient):
    """Client of one model over HTTP or gRPC (``grpc://``), for coroutines. An asynchronous context manager."""

    _counterpart = "AsyncioDecoupledModelClient with grpc://"

    def __init__(self, url: str, model_name: str, model_version: str | None = None, **settings: Any) -> None:
        super().__init__(url, model_name, model_version, **settings)
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
        wait = ReadinessWait(f"Model {self._model}", timeout_s)
        while True:
            with wait.attempt():
                if await client.is_model_ready(self._model, self._version, headers=self._headers()):
                    return
            await asyncio.sleep(wait.pause())

    @property
    async def model_config(self) -> TritonModelConfig:
        """The configuration of the model. Waits for the model at first."""
        return await self._ready()

    def _open(self) -> Any:
        self._check_open()
        if self._client is None:  # it belongs to the event loop that runs
            self._client = self._aio.InferenceServerClient(self._address.authority, ssl=self._address.secure)
        return self._client

    async def _ready(self) -> TritonModelConfig:
        client = self._open()
        if self._config is not None:
            return self._config
        if self._ensure:
            await self.wait_for_model(self._init_seconds)
        with translated():
            document = await client.get_model_config(**self._config_arguments())
        return self._take_config(document)

    def _infer(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, *, sample: bool
    ) -> Any:
        return self._outputs(inputs, by_name, parameters, headers, sample)

    async def _outputs(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, sample: bool
    ) -> dict[str, Array]:
        config = await self._ready()
        arguments = self._arguments(config, inputs, by_name, parameters, sample=sample)
        with translated():
            async with asyncio.timeout(self._seconds):
                result = await self._client.infer(**arguments, headers=self._headers(headers))
        return results_of(config, result, sample=sample)


class AsyncioDecoupledModelClient(AsyncioModelClient):
    """Client of a model that answers with streams; gRPC only. The calls are asynchronous generators."""

    _streams = True
    _counterpart = "AsyncioModelClient"

    def _infer(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, *, sample: bool
    ) -> Any:
        return self._parts(inputs, by_name, parameters, headers, sample)

    async def _parts(
        self, inputs: Any, by_name: Any, parameters: Parameters | None, headers: Parameters | None, sample: bool
    ) -> AsyncIterator[dict[str, Array]]:
        config = await self._ready()
        request = self._arguments(config, inputs, by_name, parameters, sample=sample)

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {**request, "enable_empty_final_response": True}

        with translated():
            responses = self._client.stream_infer(requests(), headers=self._headers(headers))
            async for result, error in responses:
                part = StreamPart(config, result, error, sample=sample)
                if part.outputs is not None:
                    yield part.outputs
                if part.final:
                    return
