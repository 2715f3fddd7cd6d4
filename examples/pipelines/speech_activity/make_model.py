"""Makes a network that says, chunk by chunk, whether somebody speaks, and that remembers what it heard before.

pip install onnx
python examples/pipelines/speech_activity/make_model.py

Inputs and outputs have the names, types and shapes of Silero's detector, whose file can take its place. Inside it is a
level meter: louder than the noise so far is speech.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).resolve().parent
CONSTANTS = {
    "tiny": np.float32(1e-10),
    "margin": np.float32(3.0),  # of the level above the noise, as a natural logarithm
    "steep": np.float32(2.0),
    "rises": np.float32(0.003),  # the noise follows louder chunks slowly …
    "falls": np.float32(0.5),  # … and quieter ones at once
    "fresh": np.float32(0.6),  # of the level that is new with a chunk
    "one": np.float32(1),
    "zero": np.float32(0),
    "rate": np.float32(16000),
    "first": np.array([0], np.int64),
    "second": np.array([1], np.int64),
    "cell": np.array([-1, 1], np.int64),
    "row": np.array([1, -1, 1], np.int64),
    "rest": np.array([0, 0, 0, 0, 0, 127], np.int64),
}


def main() -> None:
    """Write the network where the server looks for it."""

    def node(kind: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
        return helper.make_node(kind, inputs.split(), [output], **attributes)

    nodes = [
        # The level of the chunk.
        node("Mul", "input input", "squares"),
        node("ReduceMean", "squares", "power", axes=[1], keepdims=1),
        node("Add", "power tiny", "power_above"),
        node("Log", "power_above", "level"),
        # What is remembered, as (N, 1): level and noise so far, both 0 at the beginning.
        node("Gather", "state first", "row_0", axis=0),
        node("Gather", "row_0 first", "was_level_3", axis=2),
        node("Reshape", "was_level_3 cell", "was_level"),
        node("Gather", "state second", "row_1", axis=0),
        node("Gather", "row_1 first", "was_noise_3", axis=2),
        node("Reshape", "was_noise_3 cell", "was_noise"),
        node("Equal", "was_noise zero", "begins"),
        node("Where", "begins level was_level", "known_level"),
        node("Where", "begins level was_noise", "known_noise"),
        # Chunks of other rates are shorter or longer.
        node("Cast", "sr", "rate_given", to=TensorProto.FLOAT),
        node("Div", "rate rate_given", "duration"),
        node("Sub", "level known_level", "change"),
        node("Mul", "change fresh", "step"),
        node("Add", "known_level step", "smooth"),
        node("Sub", "smooth known_noise", "above"),
        node("Greater", "above zero", "is_louder"),
        node("Where", "is_louder rises falls", "speed"),
        node("Mul", "speed duration", "pace"),
        node("Min", "pace one", "share"),
        node("Mul", "above share", "drift"),
        node("Add", "known_noise drift", "noise"),
        node("Sub", "above margin", "clear"),
        node("Mul", "clear steep", "logit"),
        node("Sigmoid", "logit", "output"),
        # What is to be remembered, padded to the shape that Silero's has.
        node("Reshape", "smooth row", "smooth_3"),
        node("Reshape", "noise row", "noise_3"),
        node("Pad", "smooth_3 rest", "next_0"),
        node("Pad", "noise_3 rest", "next_1"),
        node("Concat", "next_0 next_1", "stateN", axis=0),
    ]

    def tensor(name: str, dims: list, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, dims)

    graph = helper.make_graph(
        nodes,
        "level_meter",
        [tensor("input", ["N", "samples"]), tensor("state", [2, "N", 128]), tensor("sr", [], TensorProto.INT64)],
        [tensor("output", ["N", 1]), tensor("stateN", [2, "N", 128])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in CONSTANTS.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    file = HERE / "models" / "vad" / "1" / "model.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, file)
    print(f"{file.relative_to(HERE)}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
