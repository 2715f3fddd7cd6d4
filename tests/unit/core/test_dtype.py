import numpy as np
import pytest

from nerite.core import tensor as dtypes
from nerite.wire import model_config

# Name on the wire, name in config.pbtxt, bytes an element, numpy type.
TABLE = [
    ("BOOL", "TYPE_BOOL", 1, "bool"),
    ("UINT8", "TYPE_UINT8", 1, "uint8"),
    ("UINT16", "TYPE_UINT16", 2, "uint16"),
    ("UINT32", "TYPE_UINT32", 4, "uint32"),
    ("UINT64", "TYPE_UINT64", 8, "uint64"),
    ("INT8", "TYPE_INT8", 1, "int8"),
    ("INT16", "TYPE_INT16", 2, "int16"),
    ("INT32", "TYPE_INT32", 4, "int32"),
    ("INT64", "TYPE_INT64", 8, "int64"),
    ("FP16", "TYPE_FP16", 2, "float16"),
    ("FP32", "TYPE_FP32", 4, "float32"),
    ("FP64", "TYPE_FP64", 8, "float64"),
    ("BYTES", "TYPE_STRING", 0, "object"),
    ("BF16", "TYPE_BF16", 2, "uint16"),
]


@pytest.mark.parametrize(("name", "config_name", "size", "numpy"), TABLE)
def test_each_type_under_each_of_its_names(name: str, config_name: str, size: int, numpy: str) -> None:
    datatype = dtypes.BY_NAME[name]
    assert dtypes.BY_CONFIG_NAME[config_name] is datatype
    assert getattr(dtypes, name) is datatype
    assert (datatype.name, datatype.config_name, datatype.size) == (name, config_name, size)
    assert datatype.numpy == np.dtype(numpy)
    assert datatype.number == model_config.DataType.Value(config_name)


def test_there_are_no_others() -> None:
    assert [datatype.name for datatype in dtypes.ALL] == [row[0] for row in TABLE]
    assert set(dtypes.BY_NAME) == {row[0] for row in TABLE}
    assert set(dtypes.BY_CONFIG_NAME) == {row[1] for row in TABLE}
    assert {value for _, value in model_config.DataType.items()} == {0, *(datatype.number for datatype in dtypes.ALL)}


@pytest.mark.parametrize(("name", "numpy"), [(row[0], row[3]) for row in TABLE if row[0] != "BF16"])
def test_from_numpy_in_either_byte_order(name: str, numpy: str) -> None:
    for order in "<>=":
        assert dtypes.from_numpy(np.dtype(numpy).newbyteorder(order)) is dtypes.BY_NAME[name]


def test_texts_of_fixed_width_are_bytes() -> None:
    assert dtypes.from_numpy(np.dtype("S5")) is dtypes.BYTES
    assert dtypes.from_numpy(np.dtype("U5")) is dtypes.BYTES


@pytest.mark.parametrize("numpy", ["complex64", "datetime64[s]", "timedelta64[s]", "V4", np.longdouble, "i4,f4"])
def test_types_that_the_protocol_lacks(numpy: str) -> None:
    assert dtypes.from_numpy(np.dtype(numpy)) is None
