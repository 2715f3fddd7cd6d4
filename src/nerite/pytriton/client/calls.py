"""What all clients share: the URL, the arguments of a call, and the configuration of the model. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from nerite.core.tensor import BY_CONFIG_NAME, Array
from nerite.pytriton.client.auth import GRPC_PREFIX, create_auth_headers
from nerite.pytriton.client.exceptions import (
    PyTritonClientInvalidUrlError,
    PyTritonClientModelDoesntSupportBatchingError,
    PyTritonClientValueError,
)
from nerite.pytriton.decorators import TritonModelConfig
from nerite.pytriton.model_config.model_config import ModelConfig, Tensor

Parameters = Mapping[str, str | int | bool]
DEFAULT_INIT_SECONDS: Final = 300.0
DEFAULT_INFERENCE_SECONDS: Final = 60.0
_PORTS: Final = {"http": 8000, "grpc": 8001}


class ServerAddress(NamedTuple):
    """Protocol and address of a server."""

    scheme: str
    """``http``, ``https``, ``grpc`` or ``grpcs``."""
    host: str
    port: int

    @property
    def protocol(self) -> str:
        """``http`` or ``grpc``."""
        return self.scheme[:4]

    @property
    def secure(self) -> bool:
        """Whether the connection has TLS."""
        return self.scheme in ("https", "grpcs")

    @property
    def authority(self) -> str:
        """``host:port``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Read ``[scheme://]host[:port]``; the scheme is http without one. Raises ``PyTritonClientInvalidUrlError``."""
        if not isinstance(url, str) or not url:
            raise PyTritonClientInvalidUrlError(
                f"The URL is {url!r}: write it as localhost:8000 or grpc://localhost:8001."
            )
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise PyTritonClientInvalidUrlError(f"The URL {url} is wrong: {error}.") from None
        if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
            raise PyTritonClientInvalidUrlError(
                f"The URL {url} must begin with http://, https://, grpc:// or grpcs://."
            )
        return cls(parts.scheme, parts.hostname, port or _PORTS[parts.scheme[:4]])


def headers_of(address: ServerAddress, headers: Mapping[str, Any] | None, token: str | None) -> dict[str, str]:
    """Return the headers of a request, with the access token."""
    found = {str(name): str(value) for name, value in (headers or {}).items()}
    if token:
        found |= create_auth_headers(token, address.protocol)
    if address.protocol == "grpc":
        found = {name.lower() if name.startswith(GRPC_PREFIX) else name: value for name, value in found.items()}
    return found


def checked_parameters(parameters: Parameters | None) -> dict[str, str | int | bool]:
    """Return custom parameters. Raises ``PyTritonClientValueError`` for a value that cannot be sent."""
    for name, value in (parameters or {}).items():
        if not isinstance(name, str) or not isinstance(value, str | int | bool):
            raise PyTritonClientValueError(f"Parameter {name!r} is {value!r}: send text, an integer or a bool.")
    return dict(parameters or {})


def read_config(document: Mapping[str, Any]) -> TritonModelConfig:
    """Return the configuration of a model from its JSON form."""

    def tensors(key: str) -> list[Tensor]:
        return [
            Tensor(
                tuple(int(size) for size in each.get("dims", ())),
                BY_CONFIG_NAME[each["data_type"]].numpy.type,
                each["name"],
                bool(each.get("optional")),
            )
            for each in document.get(key, ())
        ]

    largest = int(document.get("max_batch_size", 0))
    decoupled = bool(document.get("model_transaction_policy", {}).get("decoupled"))
    config = ModelConfig(batching=largest > 0, max_batch_size=largest, decoupled=decoupled)
    return TritonModelConfig(document["name"], tensors("input"), tensors("output"), config)


def named_inputs(config: TritonModelConfig, inputs: Sequence[Any], by_name: Mapping[str, Any]) -> dict[str, Array]:
    """Return the inputs of a call by name. Raises ``PyTritonClientValueError``."""
    names = [str(each.name) for each in config.inputs]
    if bool(inputs) == bool(by_name):
        raise PyTritonClientValueError("Pass all inputs by position, or all by name.")
    if len(inputs) > len(names):
        raise PyTritonClientValueError(f"{len(inputs)} inputs were passed, and the model has {len(names)}.")
    given = dict(zip(names, inputs, strict=False)) if inputs else dict(by_name)
    if unknown := given.keys() - set(names):
        raise PyTritonClientValueError(f"The model has no inputs {', '.join(sorted(unknown))}: {', '.join(names)}.")
    for name, value in given.items():
        if not isinstance(value, np.ndarray | np.generic):
            raise PyTritonClientValueError(f"Input '{name}' is {type(value)}: pass a numpy array.")
    return {name: _sendable(np.asarray(value)) for name, value in given.items()}


def _sendable(array: Array) -> Array:
    return np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array


def batched_inputs(
    config: TritonModelConfig, inputs: Sequence[Any], by_name: Mapping[str, Any], *, sample: bool
) -> dict[str, Array]:
    """Return the inputs of ``infer_sample`` or ``infer_batch``, with a batch dimension if the model has one."""
    found = named_inputs(config, inputs, by_name)
    if sample:
        return {name: array[np.newaxis] for name, array in found.items()} if config.batching else found
    if not config.batching:
        raise PyTritonClientModelDoesntSupportBatchingError(
            f"Model {config.model_name} has no batch dimension: use infer_sample."
        )
    sizes = {len(array) if array.ndim else 0 for array in found.values()}
    if len(sizes) > 1 or 0 in sizes:
        raise PyTritonClientValueError("The inputs of a batch must have the same number of rows, and at least one.")
    return found


def results_of(config: TritonModelConfig, result: Any, *, sample: bool) -> dict[str, Array]:
    """Return the outputs of a response, without the batch dimension that ``infer_sample`` has added."""
    names = [str(each.name) for each in config.outputs]
    found = {name: array for name in names if (array := result.as_numpy(name)) is not None}
    return {name: array[0] for name, array in found.items()} if sample and config.batching else found
