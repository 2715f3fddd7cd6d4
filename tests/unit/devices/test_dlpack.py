"""Tensors in GPU memory that libraries and the server exchange as DLPack capsules."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from cuda_process import STAND_IN
from nerite.core import tensor as dtypes
from nerite.core.tensor import DeviceBuffer
from nerite.devices import cuda, dlpack, exchange
from nerite.devices.dlpack import DeviceArray, DlpackError


@pytest.fixture
def library(cuda_process: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library that has tensors on GPUs."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    import device_arrays

    yield device_arrays
    gc.collect()
    assert device_arrays.lent() == 0


def test_a_tensor_of_a_library_is_taken_without_a_copy(library: Any) -> None:
    theirs = library.DeviceArray(np.arange(6, dtype=np.float32).reshape(2, 3), 1)
    spec, buffer = dlpack.take_from_device("x", theirs.__dlpack__())
    assert (spec.name, spec.datatype, spec.shape) == ("x", dtypes.FP32, (2, 3))
    assert (buffer.device, buffer.address, buffer.size) == (1, theirs.address, 24)
    del theirs
    gc.collect()
    assert library.lent() == 1  # it lives as long as the buffer
    assert (np.frombuffer(exchange.to_host(buffer), np.float32) == range(6)).all()
    del buffer
    gc.collect()
    assert library.lent() == 0


def test_a_capsule_is_used_once(library: Any) -> None:
    capsule = library.DeviceArray(np.zeros(3, np.int8)).__dlpack__()
    dlpack.take_from_device("x", capsule)
    with pytest.raises(DlpackError, match="was used before"):
        dlpack.take_from_device("x", capsule)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int16, np.int64, np.uint32, np.float16, np.float64])
def test_a_library_takes_a_tensor_of_the_server(library: Any, dtype: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    ours = on_gpu(array)
    assert (library.numpy_of(ours) == array).all()
    alive = weakref.ref(ours.buffer)
    spec, again = dlpack.take_from_device("y", ours.__dlpack__())
    assert spec.shape == (2, 3, 4) and spec.datatype.numpy == dtype and again.address == ours.buffer.address
    assert ours.__dlpack_device__() == (dlpack.CUDA, 0) and ours.size == 24
    del ours
    assert alive() is not None
    del again
    assert alive() is None


def test_a_capsule_that_nothing_takes_is_released(library: Any) -> None:
    ours = on_gpu(np.zeros(4, np.float32))
    capsules = [ours.__dlpack__() for _ in range(3)]
    alive = weakref.ref(ours.buffer)
    del ours
    assert alive() is not None
    del capsules
    assert alive() is None


@pytest.mark.parametrize(
    ("shape", "strides", "accepted"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((1, 3), (99, 1), True),
        ((2, 1), (1, 7), True),
        ((3,), (2,), False),
    ],
)
def test_tensors_with_gaps_are_refused(
    library: Any, shape: tuple[int, ...], strides: tuple[int, ...], accepted: bool
) -> None:
    capsule = on_gpu(np.zeros(shape, np.float32)).__dlpack__()
    dims = (ctypes.c_int64 * len(strides))(*strides)
    dlpack.dl_tensor(capsule).strides = dims
    if accepted:
        assert dlpack.take_from_device("x", capsule)[0].shape == shape
    else:
        with pytest.raises(DlpackError, match="not contiguous"):
            dlpack.take_from_device("x", capsule)


def test_types_that_the_protocol_has_not_are_refused(library: Any) -> None:
    capsule = library.DeviceArray(np.zeros(3, np.complex64)).__dlpack__()
    with pytest.raises(DlpackError, match='code "5" with 64 bits'):
        dlpack.take_from_device("x", capsule)


def on_gpu(array: Any) -> DeviceArray:
    datatype = dtypes.from_numpy(array.dtype)
    assert datatype is not None
    with exchange.stream_on(0) as stream:
        address = cuda.allocate(array.nbytes)
        stream.to_device(address, array.ctypes.data, array.nbytes)
        stream.wait()
    return DeviceArray(datatype, array.shape, DeviceBuffer(0, address, array.nbytes, None))
