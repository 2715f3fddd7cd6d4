"""Tensors of each type, in each form."""

import ml_dtypes
import numpy as np

from conformance.stock import HTTP, StockClient, exercise

NUMBERS = {
    "BOOL": bool,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


@exercise("infer")
def numbers(client: StockClient) -> None:
    arrays = {name: np.array([0, 1, 100], dtype) for name, dtype in NUMBERS.items()}
    result = client.infer("types", [client.tensor(f"IN_{name}", array) for name, array in arrays.items()])
    for name, array in arrays.items():
        came = result.as_numpy(f"OUT_{name}")
        assert (came.dtype, came.tolist()) == (array.dtype, array.tolist())


@exercise("infer")
def texts(client: StockClient) -> None:
    for array in (
        np.array(["one", "", "zw\u00f6lf"], object),
        np.array([b"\xff\x00", b"x"], object),
        np.array([b"ab"]),
    ):
        expected = [element if isinstance(element, bytes) else element.encode() for element in array]
        result = client.infer("types", [client.tensor("IN_STRING", array)])
        assert result.as_numpy("OUT_STRING").tolist() == expected


@exercise("infer")
def nothing(client: StockClient) -> None:
    for name, dtype in (("STRING", object), ("INT64", np.int64)):
        result = client.infer("types", [client.tensor(f"IN_{name}", np.array([], dtype))])
        assert result.as_numpy(f"OUT_{name}").shape == (0,)


@exercise("infer")
def brain_floats(client: StockClient) -> None:
    array = np.array([[1.5, -2.0, 3e38]], ml_dtypes.bfloat16)
    came = client.infer("words", [client.tensor("INPUT0", array)]).as_numpy("OUTPUT0")
    assert (came.dtype, came.tolist()) == (array.dtype, array.tolist())


@exercise("infer", *HTTP)
def json_both_ways(client: StockClient) -> None:
    array = np.array([1.5, -2.0], np.float32)
    words = np.array(["one", "zw\u00f6lf"], object)
    result = client.infer(
        "types",
        [client.tensor("IN_FP32", array, binary_data=False), client.tensor("IN_STRING", words, binary_data=False)],
        outputs=[client.tensors.InferRequestedOutput(f"OUT_{name}", binary_data=False) for name in ("FP32", "STRING")],
    )
    assert result.get_output("OUT_FP32")["data"] == [1.5, -2.0]
    assert result.get_output("OUT_STRING")["data"] == ["one", "zw\u00f6lf"]
    assert result.as_numpy("OUT_FP32").tolist() == array.tolist()


@exercise("infer", *HTTP)
def json_and_binary_mixed(client: StockClient) -> None:
    result = client.infer(
        "types",
        [
            client.tensor("IN_INT8", np.array([1], np.int8), binary_data=False),
            client.tensor("IN_INT16", np.array([2], np.int16), binary_data=True),
        ],
        outputs=[
            client.tensors.InferRequestedOutput("OUT_INT8", binary_data=True),
            client.tensors.InferRequestedOutput("OUT_INT16", binary_data=False),
        ],
    )
    assert result.get_output("OUT_INT8")["parameters"] == {"binary_data_size": 1}
    assert result.get_output("OUT_INT16")["data"] == [2]
    assert result.as_numpy("OUT_INT8").tolist() == [1]


@exercise("infer", *HTTP)
def half_floats_are_not_for_json(client: StockClient) -> None:
    array = np.array([1.5], np.float16)
    status, text = client.refused("infer", "types", [client.tensor("IN_FP16", array, binary_data=False)])
    assert status == "400"
    assert "FP16" in text


@exercise("infer")
def classes(client: StockClient) -> None:
    scores = np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)
    wanted = client.tensors.InferRequestedOutput("SCORES", class_count=2)
    result = client.infer("classes", [client.tensor("IN", scores)], outputs=[wanted])
    (best, second) = result.as_numpy("SCORES")[0]
    assert (best.decode().split(":")[:2], second.decode().split(":")[:2]) == (["0.400000", "1"], ["0.300000", "3"])
    assert best.count(b":") == 2


@exercise("infer")
def some_of_the_outputs(client: StockClient) -> None:
    scores = client.tensor("IN", np.ones((1, 4), np.float32))
    wanted = [client.tensors.InferRequestedOutput("COUNTS"), client.tensors.InferRequestedOutput("PLAIN")]
    result = client.infer("classes", [scores], outputs=wanted)
    assert result.as_numpy("SCORES") is None
    assert [result.as_numpy(name).dtype.name for name in ("COUNTS", "PLAIN")] == ["int32", "float64"]


@exercise("infer")
def another_shape(client: StockClient) -> None:
    tensor = client.tensors.InferInput("IN", [1], "INT32").set_shape([2, 2])
    assert (tensor.name(), tensor.datatype(), tensor.shape()) == ("IN", "INT32", [2, 2])
    tensor.set_data_from_numpy(np.arange(4, dtype=np.int32).reshape(2, 2))
    assert client.infer("echo", [tensor]).as_numpy("OUT").tolist() == [[0, 1], [2, 3]]
