"""Tensors and options of the in-process interface, without a server."""

from __future__ import annotations

import numpy as np
import pytest

import nerite.tritonserver as tritonserver
from nerite.functions.server import options_of
from nerite.tritonserver import DataType, Tensor


def test_tensors_of_objects() -> None:
    assert Tensor.from_object(np.ones((2, 3), np.float32)).shape == [2, 3]
    assert Tensor.from_object([[1, 2]]).data_type is DataType.INT64
    text = Tensor.from_object([["é", "b"]])
    assert text.data_type is DataType.BYTES
    assert text.to_string_array().tolist() == [["é", "b"]]
    assert text.to_bytes_array().tolist() == [["é".encode(), b"b"]]
    assert Tensor.from_object(text) is text


def test_tensors_are_views() -> None:
    array = np.ones(3, np.float32)
    tensor = Tensor.from_dlpack(array)
    assert tensor.data_ptr == array.ctypes.data
    assert np.shares_memory(np.from_dlpack(tensor), array)
    assert tensor.size == 12


def test_what_tensors_cannot_be() -> None:
    with pytest.raises(tritonserver.InvalidArgumentError, match="complex128"):
        Tensor.from_object(np.ones(1, complex))
    with pytest.raises(tritonserver.InvalidArgumentError, match="not BYTES"):
        Tensor.from_object([1.0]).to_string_array()
    with pytest.raises(tritonserver.InvalidArgumentError, match="DLPack has no strings"):
        np.from_dlpack(Tensor.from_object(["a"]))
    with pytest.raises(tritonserver.UnsupportedError, match="host memory"):
        Tensor.from_object([1.0]).to_device("gpu:0")


def test_options_are_flags() -> None:
    options = tritonserver.Options(
        model_repository=["b", "a"],
        server_id="mine",
        model_control_mode=tritonserver.ModelControlMode.EXPLICIT,
        startup_models=["m"],
        rate_limiter_mode=tritonserver.RateLimitMode.EXEC_COUNT,
        rate_limiter_resources=[tritonserver.RateLimiterResource("R", 4)],
        cache_config={"local": {"size": 1 << 20}},
        backend_configuration={"python": {"shm-default-byte-size": "1"}},
        exit_timeout=3,
        log_verbose=True,
    )
    parsed = options_of(options.flags())
    assert parsed.id == "mine"
    assert parsed.repository.paths == ("a", "b")
    assert parsed.repository.startup_models == ("m",)
    assert parsed.device.rate_limit == "execution_count"
    assert parsed.cache.name == "local"
    assert parsed.exit_timeout_secs == 3
    assert (parsed.log.verbose, parsed.log.info) == (1, False)
