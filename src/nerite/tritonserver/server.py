"""``Server`` and ``Model`` of the in-process interface, over a server in a thread of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from nerite.core.errors import NeriteError
from nerite.functions.embedded import EmbeddedServer
from nerite.functions.server import options_of
from nerite.observability import custom_metrics, model_metrics
from nerite.observability.exposition import Page
from nerite.observability.model_metrics import version_labels
from nerite.tritonserver.errors import InvalidArgumentError, NotFoundError, UnavailableError, translated
from nerite.tritonserver.options import MetricFormat, Options
from nerite.tritonserver.requests import InferenceRequest, NamedModel, ResponseIterator

_PAUSE: Final = 0.02


class Server:
    """A server without ports. ``start`` returns it, ``stop`` ends it."""

    def __init__(self, options: Options | None = None, **more: Any) -> None:
        """``more`` are fields of ``Options``. Raises ``InvalidArgumentError``."""
        self.options = replace(options or Options(), **more)
        try:
            parsed = options_of(
                [*self.options.flags(), "--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"]
            )
        except NeriteError as error:
            raise InvalidArgumentError(error.message) from None
        metrics = replace(parsed.metrics, gpu=self.options.gpu_metrics, cpu=self.options.cpu_metrics)
        repository = replace(parsed.repository, auto_complete=True)
        self._options = replace(parsed, metrics=metrics, repository=repository)
        self._embedded: EmbeddedServer | None = None

    def __enter__(self) -> Server:
        return self.start(wait_until_ready=True)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self, wait_until_ready: bool = False, polling_interval: float = 0.1, timeout: float | None = None
    ) -> Server:
        """Start; models are loaded when this returns. Raises ``TritonError``."""
        if self._embedded is not None:
            raise InvalidArgumentError("the server was started already")
        embedded = EmbeddedServer(self._options)
        with translated():
            embedded.start()
        self._embedded = embedded
        deadline = None if timeout is None else time.monotonic() + timeout
        while wait_until_ready and not self.ready():
            if deadline is not None and time.monotonic() > deadline:
                raise UnavailableError(f"the server is not ready within {timeout} s")
            time.sleep(polling_interval)
        return self

    def stop(self) -> None:
        """Stop gracefully. Idempotent."""
        embedded, self._embedded = self._embedded, None
        if embedded is not None:
            embedded.stop()

    def live(self) -> bool:
        """Return whether the server runs."""
        return self._embedded is not None and self._embedded.alive

    def ready(self) -> bool:
        """Return whether the server and its models are ready."""
        answers: list[bool] = []
        self.call(lambda server: server.ask_ready(answers.append))
        return answers == [True]

    def metadata(self) -> dict[str, Any]:
        """Return name, version and extensions of the server."""
        found: dict[str, Any] = self.call(lambda server: server.metadata())
        return found

    def models(self, exclude_not_ready: bool = False) -> ModelDictionary:
        """Return the models of the repositories by name and version."""
        return ModelDictionary(self, self._index(exclude_not_ready))

    def model(self, model_name: str, model_version: int = -1) -> Model:
        """Return a model; it need not be ready."""
        return Model(self, model_name, model_version)

    def load(self, model_name: str, parameters: Mapping[str, str | bytes] | None = None) -> Model:
        """Load or reload a model; return it. Raises ``TritonError``."""
        embedded = self.running
        with translated():
            embedded.run(lambda: embedded.server.load(model_name, dict(parameters or {})))
        return Model(self, model_name, -1)

    def unload(self, model: str | Model, unload_dependents: bool = False, wait_until_unloaded: bool = False) -> None:
        """Unload a model. Raises ``TritonError``."""
        name = model if isinstance(model, str) else model.name
        embedded = self.running
        with translated():
            embedded.run(lambda: embedded.server.unload(name, {"unload_dependents": unload_dependents}))
        while wait_until_unloaded and any(
            entry["name"] == name and entry.get("state") in ("READY", "UNLOADING") for entry in self._index(False)
        ):
            time.sleep(_PAUSE)

    def metrics(self, metric_format: MetricFormat = MetricFormat.PROMETHEUS) -> str:
        """Return the metrics of models as Prometheus reads them."""
        embedded = self.running
        tables = [table for table in model_metrics.TABLES if table.enabled(self._options.metrics)]

        async def read() -> str:
            page = Page()
            for table in tables:
                page.write(table, [(version_labels(each), each) for each in embedded.server.metrics()])
            embedded.server.write_metrics(page)
            custom_metrics.write(await embedded.server.custom_metrics(), page)
            return b"".join(page.pieces()).decode()

        return embedded.run(read)

    def call(self, ask: Callable[[Any], Any]) -> Any:
        """Return what a function of the server returns, called on its loop. Raises ``TritonError``."""
        embedded = self.running

        async def run() -> Any:
            return ask(embedded.server)

        with translated():
            return embedded.run(run)

    @property
    def running(self) -> EmbeddedServer:
        """The server that runs. Raises ``UnavailableError``."""
        if self._embedded is None:
            raise UnavailableError("the server does not run: call start()")
        return self._embedded

    def _index(self, ready_only: bool) -> list[dict[str, str]]:
        embedded = self.running
        with translated():
            return embedded.run(lambda: embedded.server.repository_index(ready_only))


class ModelDictionary(Mapping[Any, "Model"]):
    """Models by (name, version), or by name alone: that of the latest version."""

    def __init__(self, server: Server, index: list[dict[str, str]]) -> None:
        self._models = {}
        for entry in index:
            version = int(entry.get("version") or -1)
            self._models[entry["name"], version] = Model(
                server, entry["name"], version, entry.get("state") or None, entry.get("reason") or None
            )

    def __getitem__(self, key: Any) -> Model:
        if isinstance(key, tuple):
            return self._models[key]
        versions = [version for name, version in self._models if name == key]
        if not versions:
            raise KeyError(key)
        return self._models[key, max(versions)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __repr__(self) -> str:
        return repr(self._models)


class Model(NamedModel):
    """A model of a server. ``version`` -1 is the one that the server chooses."""

    def __init__(
        self, server: Server, name: str, version: int = -1, state: str | None = None, reason: str | None = None
    ) -> None:
        self._server = server
        self.name = name
        self.version = version
        self.state = state
        self.reason = reason

    def __repr__(self) -> str:
        found: dict[str, Any] = {"name": self.name, "version": self.version, "state": self.state}
        return repr({**found, "reason": self.reason} if self.reason else found)

    @property
    def _label(self) -> str:
        return "" if self.version < 0 else str(self.version)

    def create_request(self, **fields: Any) -> InferenceRequest:
        """Return a request to this model."""
        return InferenceRequest(model=self, **fields)

    def infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **fields: Any
    ) -> ResponseIterator:
        """Send a request; return its responses as they arrive. ``fields`` are those of ``InferenceRequest``."""
        request = inference_request if inference_request is not None else self.create_request(**fields)
        header, data = replace(request, inputs=self._typed(request.inputs)).header()
        with translated():
            call = self._server.running.infer(header, data, request.request_id or "")
        return ResponseIterator(call, request, raise_on_error)

    def async_infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **fields: Any
    ) -> ResponseIterator:
        """Send a request; return its responses, for ``async for``."""
        return self.infer(inference_request, raise_on_error, **fields)

    def _typed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs, with lists of numbers as arrays of the type that the model declares."""
        plain = {name for name, value in inputs.items() if isinstance(value, list | tuple | int | float)}
        if not plain:
            return dict(inputs)
        signature = self._server.call(lambda server: server.signature(self.name, self._label))
        found = dict(inputs)
        for name in plain & signature.inputs.keys():
            datatype = signature.inputs[name].datatype
            if datatype.size:
                try:
                    found[name] = np.asarray(inputs[name]).astype(datatype.numpy, casting="same_kind")
                except (ValueError, TypeError) as error:
                    raise InvalidArgumentError(f"input '{name}' is not a tensor of {datatype.name}: {error}") from None
        return found

    def ready(self) -> bool:
        """Return whether it is ready."""
        answers: list[bool] = []
        try:
            self._server.call(lambda server: server.ask_model_ready(self.name, self._label, answers.append))
        except (NotFoundError, UnavailableError):
            return False
        return answers == [True]

    def metadata(self) -> dict[str, Any]:
        """Return inputs, outputs and versions."""
        found: dict[str, Any] = self._server.call(lambda server: server.model_metadata(self.name, self._label))
        return found

    def config(self, config_version: int = 1) -> dict[str, Any]:
        """Return the complete configuration."""
        found: dict[str, Any] = self._server.call(lambda server: server.model_config(self.name, self._label))
        return found

    def statistics(self) -> dict[str, Any]:
        """Return the statistics."""
        found = self._server.call(lambda server: server.statistics(self.name, self._label))
        return {"model_stats": found}

    def batch_properties(self) -> int:
        """Return 2 if the first dimension is the batch, else 1, as Triton's flags have it."""
        return 2 if self.config().get("max_batch_size", 0) > 0 else 1

    def transaction_properties(self) -> int:
        """Return 2 for a model that may answer with a stream, else 1, as Triton's flags have it."""
        return 2 if self.config().get("model_transaction_policy", {}).get("decoupled") else 1
