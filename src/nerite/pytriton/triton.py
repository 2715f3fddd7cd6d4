"""``Triton``: a server in this process, whose models are callables of the program."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from nerite.cli.command_line import TRITON
from nerite.config.options import RESTRICTED_CATEGORIES, ServerOptions
from nerite.core.errors import NeriteError
from nerite.functions.embedded import EmbeddedServer
from nerite.functions.model_directory import write_registered
from nerite.functions.registered import register, unregister
from nerite.functions.server import flags_of, options_of
from nerite.pytriton.decorators import TritonContext, TritonModelConfig
from nerite.pytriton.exceptions import (
    PyTritonBadParameterError,
    PyTritonInvalidOperationError,
    PyTritonUnrecoverableError,
)
from nerite.pytriton.execution import bound_class
from nerite.pytriton.model_config.model_config import ModelConfig, Tensor, named, triton_config

_ENVIRONMENT: Final = "PYTRITON_TRITON_CONFIG_"
ACCESS_HEADER: Final = "triton-access-token"
_RESTRICTED: Final = ("shared-memory", "model-repository", "statistics", "trace", "logging")
"""Categories of endpoints that need the access token, unless others are named."""


@dataclass
class TritonConfig:
    """Flags of the server; None leaves the default. Each is the flag of ``tritonserver`` of that name."""

    id: str | None = None
    log_verbose: int | None = None
    log_file: str | Path | None = None
    exit_timeout_secs: int | None = None
    exit_on_error: bool | None = None
    strict_readiness: bool | None = None
    allow_http: bool | None = None
    http_address: str | None = None
    http_port: int | None = None
    http_header_forward_pattern: str | None = None
    http_thread_count: int | None = None
    http_restricted_api: str | None = None
    allow_grpc: bool | None = None
    grpc_address: str | None = None
    grpc_port: int | None = None
    grpc_header_forward_pattern: str | None = None
    grpc_infer_allocation_pool_size: int | None = None
    grpc_use_ssl: bool | None = None
    grpc_use_ssl_mutual: bool | None = None
    grpc_server_cert: str | Path | None = None
    grpc_server_key: str | Path | None = None
    grpc_root_cert: str | Path | None = None
    grpc_infer_response_compression_level: str | None = None
    grpc_keepalive_time: int | None = None
    grpc_keepalive_timeout: int | None = None
    grpc_keepalive_permit_without_calls: bool | None = None
    grpc_http2_max_pings_without_data: int | None = None
    grpc_http2_min_recv_ping_interval_without_data: int | None = None
    grpc_http2_max_ping_strikes: int | None = None
    grpc_restricted_protocol: str | None = None
    allow_metrics: bool | None = None
    allow_gpu_metrics: bool | None = None
    allow_cpu_metrics: bool | None = None
    metrics_interval_ms: int | None = None
    metrics_port: int | None = None
    metrics_address: str | None = None
    allow_sagemaker: bool | None = None
    sagemaker_port: int | None = None
    sagemaker_safe_port_range: str | None = None
    sagemaker_thread_count: int | None = None
    allow_vertex_ai: bool | None = None
    vertex_ai_port: int | None = None
    vertex_ai_thread_count: int | None = None
    vertex_ai_default_model: str | None = None
    metrics_config: Sequence[str] | None = None
    trace_config: Sequence[str] | None = None
    cache_config: Sequence[str] | None = None
    cache_directory: str | None = None
    buffer_manager_thread_count: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by their names."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> TritonConfig:
        """Return a configuration; fields of other names are refused. Raises ``PyTritonBadParameterError``."""
        known = {each.name for each in fields(cls)}
        if unknown := config.keys() - known:
            raise PyTritonBadParameterError(f"TritonConfig has no {', '.join(sorted(unknown))}.")
        return cls(**config)

    @classmethod
    def from_env(cls) -> TritonConfig:
        """Return what variables such as PYTRITON_TRITON_CONFIG_HTTP_PORT set."""
        known = {each.name for each in fields(cls)}
        named = {key.removeprefix(_ENVIRONMENT).lower(): value for key, value in os.environ.items()
                 if key.startswith(_ENVIRONMENT)}  # fmt: skip
        return cls.from_dict({key: value for key, value in named.items() if key in known})

    def flags(self) -> list[str]:
        """Return the flags that are set."""
        return flags_of({name: value for name, value in self.to_dict().items() if value is not None})


@dataclass(frozen=True)
class TritonLifecyclePolicy:
    """When the server starts. Both fields are accepted and change nothing: it starts with ``run`` or ``serve``."""

    launch_triton_on_startup: bool = True
    local_model_store: bool = False


@dataclass
class TritonSecurityConfig:
    """The token that clients send, and the categories of endpoints that need it."""

    access_token: str | None = None
    restricted_endpoints: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self.access_token = self.access_token or secrets.token_urlsafe(24)
        wanted = _RESTRICTED if self.restricted_endpoints is None else tuple(self.restricted_endpoints)
        unknown = set(wanted) - set(RESTRICTED_CATEGORIES)
        if unknown:
            raise PyTritonBadParameterError(
                f"restricted_endpoints: {', '.join(sorted(unknown))} is none of {', '.join(RESTRICTED_CATEGORIES)}."
            )
        self.restricted_endpoints = wanted

    def flags(self) -> list[str]:
        """Return the flags that restrict the endpoints of both ports."""
        if not self.restricted_endpoints:
            return []
        rule = f"{','.join(self.restricted_endpoints)}:{ACCESS_HEADER}={self.access_token}"
        return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]


class Triton:
    """A server in this process. A context manager, which stops it.

    Callables run in threads of this process, and share what they refer to. Thread-safe but for ``serve``.
    """

    def __init__(
        self,
        *,
        config: TritonConfig | None = None,
        workspace: str | Path | None = None,
        triton_lifecycle_policy: TritonLifecyclePolicy | None = None,
        security_config: TritonSecurityConfig | None = None,
    ) -> None:
        """``workspace``: where model directories are written; by default, a temporary directory.

        Raises ``PyTritonBadParameterError``.
        """
        given = {name: value for name, value in (config or TritonConfig()).to_dict().items() if value is not None}
        self._config = TritonConfig.from_dict({**TritonConfig.from_env().to_dict(), **given})
        self._security = security_config or TritonSecurityConfig()
        # Removed with this object.
        self._own = tempfile.TemporaryDirectory(prefix="nerite-pytriton-") if workspace is None else None
        self._directory = Path(self._own.name if self._own is not None else workspace or "")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._keys: dict[str, str] = {}
        self._embedded: EmbeddedServer | None = None
        self._ends = threading.Event()
        self._fatal: PyTritonUnrecoverableError | None = None

    def __enter__(self) -> Triton:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def bind(
        self,
        model_name: str,
        infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
    ) -> None:
        """Offer a callable as a model; several are instances of it. A running server loads it at once.

        ``strict``: outputs are compared with their declarations. Raises ``PyTritonModelConfigError`` and the like for
        what is wrong with the arguments.
        """
        if trace_config:
            raise PyTritonBadParameterError(
                "trace_config of one model is not possible: set TritonConfig(trace_config=…)."
            )
        if not model_name or "/" in model_name or model_name.startswith("."):
            raise PyTritonBadParameterError(f"'{model_name}' is not a name for a model.")
        if model_version != 1:
            raise PyTritonBadParameterError(f"model_version is {model_version}: bound models have the version 1.")
        callables = list(infer_func) if isinstance(infer_func, Sequence) else [infer_func]
        if not callables or not all(map(callable, callables)):
            raise PyTritonBadParameterError(f"infer_func of '{model_name}' must be a callable, or a list of them.")
        config = config or ModelConfig()
        ins, outs = named(inputs, "INPUT"), named(outputs, "OUTPUT")
        context = TritonContext(TritonModelConfig(model_name, ins, outs, config))
        key = register(bound_class(callables, context, strict, self._failed))
        try:
            document = triton_config(model_name, ins, outs, config, len(callables))
            write_registered(self._directory, model_name, key, document)
        except NeriteError as error:
            unregister(key)
            raise PyTritonBadParameterError(f"'{model_name}': {error.message}") from None
        if (before := self._keys.get(model_name)) is not None:
            unregister(before)
        self._keys[model_name] = key
        if self._embedded is not None:
            self._load(model_name)

    def run(self) -> None:
        """Start the server, and return when the bound models are ready. Idempotent; possible again after ``stop``."""
        if self._embedded is not None:
            return
        embedded = EmbeddedServer(self._options())
        try:
            embedded.start()
        except NeriteError as error:
            embedded.stop()
            raise PyTritonInvalidOperationError(error.message) from None
        self._embedded = embedded

    def connect(self) -> None:
        """Start the server, as ``run`` does."""
        self.run()

    def serve(self, monitoring_period_s: float = 10.0) -> None:
        """Serve until SIGINT or SIGTERM arrives, or ``stop`` is called. Raises ``PyTritonUnrecoverableError``."""
        self._ends.clear()
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, self._signalled)
        try:
            self.run()
            while not self._ends.wait(monitoring_period_s) and self.is_alive():
                pass
        finally:
            self.stop()
            for each, handler in before.items():
                signal.signal(each, handler)
        if self._fatal is not None:
            raise self._fatal

    def stop(self) -> bool:
        """Stop the server; return whether it ran. Idempotent. Models stay bound."""
        self._ends.set()
        embedded, self._embedded = self._embedded, None
        if embedded is not None:
            embedded.stop()
        return embedded is not None

    def is_alive(self) -> bool:
        """Return whether the server runs."""
        return self._embedded is not None and self._embedded.alive

    def is_connected(self) -> bool:
        """Return whether the server runs and all its models are ready."""
        embedded = self._embedded
        if embedded is None or not embedded.alive:
            return False
        answers: list[bool] = []

        async def ask() -> None:
            embedded.server.ask_ready(answers.append)

        embedded.run(ask)
        return answers == [True]

    def get_access_token(self) -> str:
        """Return the token that restricted endpoints need."""
        assert self._security.access_token is not None
        return self._security.access_token

    @property
    def ports(self) -> dict[str, int]:
        """Numbers of the open ports. Not part of PyTriton's interface."""
        return dict(self._embedded.ports) if self._embedded is not None else {}

    def _options(self) -> ServerOptions:
        try:
            where = f"--model-repository={self._directory}"
            options = options_of([where, *self._security.flags(), *self._config.flags()], os.environ, TRITON)
        except NeriteError as error:
            raise PyTritonBadParameterError(error.message) from None
        repository = replace(options.repository, control_mode="explicit", startup_models=("*",))
        return replace(options, repository=repository)

    def _load(self, name: str) -> None:
        embedded = self._embedded
        assert embedded is not None
        try:
            embedded.run(lambda: embedded.server.load(name, {}))
        except NeriteError as error:
            raise PyTritonInvalidOperationError(f"'{name}' cannot be loaded: {error.message}") from None

    def _failed(self, error: PyTritonUnrecoverableError) -> None:
        self._fatal = error
        self._ends.set()

    def _signalled(self, _number: int, _frame: FrameType | None) -> None:
        self._ends.set()


class RemoteTriton:
    """PyTriton's class for models of one process in the server of another, which Nerite does not have."""

    def __init__(self, url: str, workspace: str | Path | None = None, access_token: str | None = None) -> None:
        """Raises ``PyTritonInvalidOperationError``, with the remedy."""
        raise PyTritonInvalidOperationError(
            "RemoteTriton is not available: have each program run a server of its own, Triton(), and put nerite route "
            "in front of them (docs/router.md)."
        )
