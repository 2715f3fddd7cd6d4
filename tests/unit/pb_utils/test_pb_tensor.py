"""``pb_utils.Tensor``: what it keeps, what it shares, what it refuses."""

from __future__ import annotations

import ctypes
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import triton_python_backend_utils as pb_utils
from nerite.core import tensor as dtypes
from nerite.core.tensor import TensorSpec, to_array
from nerite.devices.dlpack import dl_tensor
from triton_python_backend_utils.tensor import ReceivedTensor, wire_form

NUMERIC = [kind for kind in dtypes.ALL if kind not in (dtypes.BYTES, dtypes.BF16)]


def received(datatype: dtypes.DataType, shape: tuple[int, ...], data: bytes | bytearray) -> ReceivedTensor:
    return ReceivedTensor(TensorSpec("IN", datatype, shape), data)


@given(st.sampled_from(NUMERIC).flatmap(lambda kind: arrays.arrays(kind.numpy, arrays.array_shapes(min_side=0))))
def test_numbers_go_out_as_they_are_and_come_back(array: np.ndarray[Any, Any]) -> None:
    tensor = pb_utils.Tensor("T", array)
    assert (tensor.name(), tensor.shape()) == ("T", [*array.shape])
    (datatype,) = (each for each in NUMERIC if each.number == tensor.triton_dtype())
    assert datatype.numpy == array.dtype
    data = bytes(wire_form(tensor))
    assert data == array.tobytes()
    assert received(datatype, array.shape, data).as_numpy().tobytes() == array.tobytes()


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_strings_go_out_in_wire_form_and_come_back(strings: list[bytes]) -> None:
    array = np.empty(len(strings), object)
    array[:] = strings
    tensor = pb_utils.Tensor("T", array)
    assert tensor.triton_dtype() == dtypes.BYTES.number
    assert received(dtypes.BYTES, array.shape, bytes(wire_form(tensor))).as_numpy().tolist() == strings


@given(
    arrays.arrays(np.int16, arrays.array_shapes(max_dims=3)),
    st.sampled_from(
        [lambda a: a.T, lambda a: a[::2], lambda a: a[..., ::-1], lambda a: np.broadcast_to(a, (2, *a.shape))]
    ),
)
def test_any_layout_goes_out_row_by_row(array: np.ndarray[Any, Any], view: Any) -> None:
    laid_out = view(array)
    tensor = pb_utils.Tensor("T", laid_out)
    assert tensor.shape() == [*laid_out.shape]
    assert bytes(wire_form(tensor)) == laid_out.tobytes()


def test_a_contiguous_array_is_kept() -> None:
    array = np.arange(4)
    tensor = pb_utils.Tensor("T", array)
    assert tensor.as_numpy() is array
    array[0] = 7
    assert bytes(wire_form(tensor))[0] == 7


def test_what_it_says_of_itself() -> None:
    tensor = pb_utils.Tensor("T", np.zeros((2, 3), np.float32))
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("T", [2, 3], 11, True)
    assert pb_utils.triton_to_numpy_type(tensor.triton_dtype()) is np.float32
    assert tensor.__dlpack_device__() == (1, 0)
    assert pb_utils.Tensor("T", np.array(3.0)).shape() == []


def test_a_received_tensor_is_a_view_made_once() -> None:
    buffer = bytearray(8)
    tensor = received(dtypes.FP32, (2,), buffer)
    array = tensor.as_numpy()
    assert tensor.as_numpy() is array
    array[1] = 1
    assert buffer == b"\0\0\0\0\0\0\x80?"


def test_a_received_tensor_of_constant_memory_cannot_be_written_to() -> None:
    assert not received(dtypes.FP32, (2,), bytes(8)).as_numpy().flags.writeable


def test_a_received_tensor_sent_on_is_the_same_memory() -> None:
    buffer = bytearray(4000)
    tensor = received(dtypes.FP32, (1000,), buffer)
    assert wire_form(tensor) is buffer
    forwarded = wire_form(pb_utils.Tensor("OUT", tensor.as_numpy()))
    buffer[:] = b"abcd" * 1000
    assert bytes(forwarded) == b"abcd" * 1000


@pytest.mark.parametrize("kind", ["U1", "c8", ">f4", "M8[s]", "V4", "g"])
def test_types_that_the_protocol_does_not_have(kind: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        pb_utils.Tensor("T", np.zeros(2, kind))


def test_subclasses_are_welcome() -> None:
    class Name(str):
        pass

    class Marked(np.ndarray):
        pass

    array = np.arange(3, dtype=np.uint8).view(Marked)
    assert bytes(wire_form(pb_utils.Tensor(Name("T"), array))) == b"\0\1\2"


def test_classes_have_the_name_that_models_know() -> None:
    assert str(pb_utils.Tensor) == "<class 'c_python_backend_utils.Tensor'>"
    assert str(pb_utils.TritonModelException) == "<class 'c_python_backend_utils.TritonModelException'>"
    assert str(pb_utils.ModelConfig) == "<class 'triton_python_backend_utils.ModelConfig'>"
    error = pickle.loads(pickle.dumps(pb_utils.TritonModelException("no")))
    assert (type(error), str(error)) == (pb_utils.TritonModelException, "no")


# --- BF16


def test_bf16_has_no_array() -> None:
    tensor = received(dtypes.BF16, (2,), bytearray(4))
    assert (tensor.triton_dtype(), tensor.shape()) == (14, [2])
    with pytest.raises(pb_utils.TritonModelException) as refused:
        tensor.as_numpy()
    assert str(refused.value) == (
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
    )


def test_bf16_travels_by_dlpack_and_shares_memory() -> None:
    buffer = bytearray(b"\x80\x3f\x00\x40")
    tensor = received(dtypes.BF16, (2,), buffer)
    seen = dl_tensor(tensor.to_dlpack())
    assert (seen.code, seen.bits, seen.ndim, seen.shape[0]) == (4, 16, 1, 2)
    again = pb_utils.Tensor.from_dlpack("OUT", tensor)
    assert (again.name(), again.triton_dtype(), again.shape()) == ("OUT", dtypes.BF16.number, [2])
    data = wire_form(again)
    assert bytes(data) == b"\x80\x3f\x00\x40"
    buffer[0:2] = b"\0\0"
    assert bytes(data) == b"\0\0\x00\x40"


# --- DLPack


@pytest.mark.parametrize("datatype", NUMERIC, ids=lambda kind: kind.name)
def test_dlpack_both_ways(datatype: dtypes.DataType) -> None:
    array = np.ones((2, 3), datatype.numpy)
    tensor = pb_utils.Tensor("T", array)
    assert np.shares_memory(np.from_dlpack(tensor), array)
    for source in (array, tensor, tensor.to_dlpack()):
        taken = pb_utils.Tensor.from_dlpack("T", source)
        assert np.shares_memory(taken.as_numpy(), array)
        assert taken.as_numpy().dtype == datatype.numpy
        assert taken.shape() == [2, 3]


def test_memory_lives_as_long_as_what_was_made_of_it() -> None:
    array = np.arange(1000)
    capsule = pb_utils.Tensor("T", array).to_dlpack()
    del array
    taken = pb_utils.Tensor.from_dlpack("T", capsule)
    del capsule
    assert taken.as_numpy().tolist() == list(range(1000))


def test_constant_memory_is_copied_for_dlpack() -> None:
    tensor = received(dtypes.UINT8, (2,), b"ab")
    assert np.from_dlpack(tensor).tolist() == [97, 98]


def test_scalars_and_empty_tensors_by_dlpack() -> None:
    assert pb_utils.Tensor.from_dlpack("T", np.array(3)).shape() == []
    assert pb_utils.Tensor.from_dlpack("T", np.zeros((2, 0))).shape() == [2, 0]


def test_strings_have_no_dlpack() -> None:
    for tensor in (pb_utils.Tensor("T", np.array(["x"], object)), received(dtypes.BYTES, (1,), b"\1\0\0\0x")):
        with pytest.raises(pb_utils.TritonModelException, match=r"^DLPack does not have support for string tensors\.$"):
            tensor.to_dlpack()


NOT_CONTIGUOUS = (
    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (np.zeros((2, 3)).T, NOT_CONTIGUOUS),
        (np.zeros((4, 4))[:, ::2], NOT_CONTIGUOUS),
        (np.zeros(4)[::2], NOT_CONTIGUOUS),
        (np.zeros(2, np.complex64), 'DType code "5" with 64 bits and 1 lanes is not supported.'),
        ([1], "Provided tensor is not supported. Tensor must be a DLPack capsule         or have `__dlpack__` and "
              "`__dlpack_device__` attributes"),
    ],
)  # fmt: skip
def test_dlpack_refusals(source: object, text: str) -> None:
    with pytest.raises(pb_utils.TritonModelException) as refused:
        pb_utils.Tensor.from_dlpack("T", source)
    assert str(refused.value) == text


def test_dlpack_needs_a_name_and_takes_a_capsule_once() -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        pb_utils.Tensor.from_dlpack("", np.zeros(1))
    capsule = np.zeros(1).__dlpack__()
    pb_utils.Tensor.from_dlpack("T", capsule)
    with pytest.raises(pb_utils.TritonModelException, match="A capsule can be used only once"):
        pb_utils.Tensor.from_dlpack("T", capsule)


class OnDevice:
    """A tensor of a library that keeps it on some device."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __dlpack__(self, *, stream: object = None) -> object:
        capsule = np.arange(3).__dlpack__()
        dl_tensor(capsule).device_type = self.device
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


class OnGpu(OnDevice):
    def __init__(self) -> None:
        super().__init__(2)

    def cpu(self) -> np.ndarray[Any, Any]:
        return np.arange(3)


def test_a_tensor_on_the_gpu_is_fetched() -> None:
    assert pb_utils.Tensor.from_dlpack("T", OnGpu()).as_numpy().tolist() == [0, 1, 2]


def test_a_capsule_on_the_gpu_is_fetched_by_torch_if_the_model_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def from_dlpack(capsule: object) -> OnGpu:
        taken.append(capsule)
        return OnGpu()

    torch = SimpleNamespace(utils=SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=from_dlpack)))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]  # stands for the module
    capsule = OnGpu().__dlpack__()
    assert pb_utils.Tensor.from_dlpack("T", capsule).as_numpy().tolist() == [0, 1, 2]
    assert taken == [capsule]


@pytest.mark.parametrize("as_capsule", [False, True])
def test_other_devices_are_refused(as_capsule: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for device, text in (
        (2, "memory allocated on GPU device"),
        (7, "DLDevice type 7 is not support by Python backend."),
    ):
        source = OnDevice(device)
        with pytest.raises(pb_utils.TritonModelException, match=text):
            pb_utils.Tensor.from_dlpack("T", source.__dlpack__() if as_capsule else source)


def test_pinned_memory_is_host_memory() -> None:
    assert pb_utils.Tensor.from_dlpack("T", OnDevice(3)).as_numpy().tolist() == [0, 1, 2]


def test_size_of_the_struct() -> None:
    """It is read from memory that others have written; dlpack.h says how."""
    assert ctypes.sizeof(type(dl_tensor(np.zeros(1).__dlpack__()))) == 48


def test_array_of_a_tensor_equals_what_the_core_makes_of_it() -> None:
    spec = TensorSpec("IN", dtypes.INT16, (2, 2))
    data = np.arange(4, dtype=np.int16).tobytes()
    assert (ReceivedTensor(spec, data).as_numpy() == to_array(spec, data)).all()
