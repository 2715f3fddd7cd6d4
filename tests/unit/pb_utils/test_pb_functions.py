"""The functions of ``triton_python_backend_utils``, and what importing it costs."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import c_python_backend_utils
import triton_python_backend_utils as pb_utils

CONFIG: dict[str, Any] = {"input": [{"name": "a"}, {"name": "b", "dims": [1]}], "output": [{"name": "c"}]}


def test_configuration_by_name() -> None:
    assert pb_utils.get_input_config_by_name(CONFIG, "b") == {"name": "b", "dims": [1]}
    assert pb_utils.get_output_config_by_name(CONFIG, "c") is CONFIG["output"][0]
    assert pb_utils.get_input_config_by_name(CONFIG, "c") is None
    assert pb_utils.get_output_config_by_name({}, "c") is None


def test_decoupled() -> None:
    assert pb_utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}})
    assert not pb_utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": False}})
    assert not pb_utils.using_decoupled_model_transaction_policy({})


TYPES = [
    ("TYPE_BOOL", 1, bool), ("TYPE_UINT8", 2, np.uint8), ("TYPE_UINT16", 3, np.uint16), ("TYPE_UINT32", 4, np.uint32),
    ("TYPE_UINT64", 5, np.uint64), ("TYPE_INT8", 6, np.int8), ("TYPE_INT16", 7, np.int16), ("TYPE_INT32", 8, np.int32),
    ("TYPE_INT64", 9, np.int64), ("TYPE_FP16", 10, np.float16), ("TYPE_FP32", 11, np.float32),
    ("TYPE_FP64", 12, np.float64), ("TYPE_STRING", 13, np.object_),
]  # fmt: skip


@pytest.mark.parametrize(("name", "number", "kind"), TYPES)
def test_types(name: str, number: int, kind: type) -> None:
    assert pb_utils.triton_string_to_numpy(name) is kind
    assert pb_utils.TRITON_STRING_TO_NUMPY[name] is kind
    assert pb_utils.triton_to_numpy_type(number) is (np.bool_ if kind is bool else kind)
    assert pb_utils.numpy_to_triton_type(kind) == number
    assert pb_utils.numpy_to_triton_type(np.dtype(kind)) == number


def test_types_without_a_counterpart() -> None:
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.triton_to_numpy_type(0) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.numpy_to_triton_type(np.dtype("S3")) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")


def test_serialize() -> None:
    mixed = np.array([b"a", "é", 3, None], dtype=object)
    assert pb_utils.serialize_byte_tensor(mixed) == b"\1\0\0\0a\2\0\0\0\xc3\xa9\1\0\0\x003\4\0\0\0None"
    assert pb_utils.serialize_byte_tensor(np.array([b"a", b"b\0"])) == b"\1\0\0\0a\1\0\0\0b"
    assert pb_utils.serialize_byte_tensor(np.array([["a", "b"], ["c", "d"]], object).T) == (
        b"\1\0\0\0a\1\0\0\0c\1\0\0\0b\1\0\0\0d"
    )
    assert pb_utils.serialize_byte_tensor(np.zeros(0, object)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(2)) is None
    assert pb_utils.serialize_byte_tensor(np.array(["a"])) is None


@given(st.lists(st.binary(max_size=300), min_size=1))
def test_serialize_and_back(strings: list[bytes]) -> None:
    array = np.empty(len(strings), object)
    array[:] = strings
    wire = pb_utils.serialize_byte_tensor(array)
    assert isinstance(wire, bytes)
    for form in (wire, np.frombuffer(wire, np.uint8)):
        back = pb_utils.deserialize_bytes_tensor(form)
        assert back.dtype == object
        assert back.shape == (len(strings),)
        assert back.tolist() == strings


def test_deserialize_nothing() -> None:
    assert pb_utils.deserialize_bytes_tensor(b"").shape == (0,)


@given(st.binary(min_size=1, max_size=12))
def test_deserialize_anything(wire: bytes) -> None:
    """Either it is whole, or it is refused; never half of it."""
    try:
        strings = pb_utils.deserialize_bytes_tensor(wire)
    except ValueError as error:
        assert "extends beyond" in str(error)
    else:
        assert pb_utils.serialize_byte_tensor(strings) == wire


def test_logger_writes_to_logging_with_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "triton_python_backend_utils"):
        pb_utils.Logger.log("100 %s")
        pb_utils.Logger.log("b", pb_utils.Logger.ERROR)
        pb_utils.Logger.log(message="c", level=pb_utils.Logger.LogLevel.WARNING)
        pb_utils.Logger.log_info("d")
        pb_utils.Logger.log_warn("e")
        pb_utils.Logger.log_error("f")
        pb_utils.Logger.log_verbose("g")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "100 %s"),
        ("ERROR", "b"),
        ("WARNING", "c"),
        ("INFO", "d"),
        ("WARNING", "e"),
        ("ERROR", "f"),
        ("DEBUG", "g"),
    ]
    assert {record.filename for record in caplog.records} == {"test_pb_functions.py"}
    assert {record.funcName for record in caplog.records} == {"test_logger_writes_to_logging_with_the_callers_line"}


def test_levels_have_tritons_numbers() -> None:
    logger = pb_utils.Logger
    assert [logger.INFO, logger.WARNING, logger.ERROR, logger.VERBOSE] == [0, 1, 2, 3]
    assert [*logger.LogLevel] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("member", "shown"),
    [
        (pb_utils.TritonError.NOT_FOUND, "__ErrorCode.NOT_FOUND: 2"),
        (pb_utils.Logger.WARNING, "LogLevel.WARNING: 1"),
        (pb_utils.MetricFamily.HISTOGRAM, "MetricKind.HISTOGRAM: 2"),
        (pb_utils.TRITONSERVER_MEMORY_CPU, "MemoryType.TRITONSERVER_MEMORY_CPU: 1"),
    ],
)
def test_numbers_are_printed_with_their_names(member: IntEnum, shown: str) -> None:
    text, _, number = shown.partition(": ")
    assert (repr(member), str(member), f"{member}", f"{member:>60}".strip()) == (f"<{shown}>", *[text] * 3)
    assert member == int(number)
    assert pickle.loads(pickle.dumps(member)) is member


def test_the_binding_has_the_same_classes_and_functions() -> None:
    for name in c_python_backend_utils.__all__:
        same = pb_utils.MetricKind[name] if name in pb_utils.MetricKind.__members__ else getattr(pb_utils, name)
        assert getattr(c_python_backend_utils, name) is same
    ours = {name for name in pb_utils.__all__ if getattr(pb_utils, name).__class__ is type}
    assert ours - set(c_python_backend_utils.__all__) == {"ModelConfig"}


def test_importing_it_is_cheap() -> None:
    """Models' environments have numpy, and need nothing else; and the worker needs nothing of the server."""
    script = (
        "import sys; before = set(sys.modules); import numpy; numpys = set(sys.modules) - before\n"
        "import triton_python_backend_utils, nerite.backends.python\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before - numpys} - sys.stdlib_module_names\n"
        "print(*sorted(new))\n"
        "print(*sorted({name.split('.')[1] for name in sys.modules if name.startswith('nerite.')}))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    outside, rooms = done.stdout.splitlines()
    assert set(outside.split()) <= {"nerite", "triton_python_backend_utils", "numpy"}
    assert set(rooms.split()) == {"backends", "core", "devices"}


def test_everything_that_is_exported_is_there() -> None:
    assert sorted(set(pb_utils.__all__)) == sorted(pb_utils.__all__)
    assert all(hasattr(pb_utils, name) for name in pb_utils.__all__)
