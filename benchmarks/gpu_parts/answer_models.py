"""The models whose answers are compared: small ones of every format, each written with what a processor answers.

    python -m gpu_parts.answer_models FOLDER KIND MODEL ...

writes ``FOLDER/models/MODEL`` and ``FOLDER/answers/MODEL.npy``. Importing this imports no framework.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WIDTH = 64
ROWS = 32
"""The largest batch."""
DIMS: Mapping[str, tuple[int, ...]] = {"cnn": (3, 32, 32), "encoder": (64, 768), "wide": (WIDTH,)}
"""The shape of one row of each net's input. The first two are those of ``zoo.nets``; y = max(x W, 0) is the third."""
_FLOAT, _BF16 = 1e-4, 2e-2
_IN_PYTHON = """
import numpy as np
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        self.weights = torch.from_numpy(np.load(__file__.replace("model.py", "weights.npy"))).to(self.device)

    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, rows):
        computed = torch.relu(torch.from_numpy(rows).to(self.device) @ self.weights).cpu().numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", computed)])
"""
_AS_A_MODULE = """
import torch


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(64, 64))

    def forward(self, X):
        return {"OUT": torch.relu(X @ self.weights)}
"""


class Case(NamedTuple):
    """A model, and how near its answers are to be to those of a processor."""

    title: str
    package: str
    """What has to be installed."""
    net: str
    write: Callable[[str, Path, bool], NDArray[np.float32]]
    """Writes a version, for a GPU or not, and returns the answers of a processor."""
    config: str
    """Besides the batch, inputs, outputs and instances."""
    tolerance: float = _FLOAT
    """Largest difference, in proportion to the largest answer."""
    names: tuple[str, str] = ("X", "OUT")
    """Of the input and the output."""
    not_rehearsed: str = ""
    """Why it is not tried on processors."""
    profiles: str = ""
    """For the instance group."""
    columns: int = -1
    """Of the output; -1 where the model does not know."""


def rows(net: str) -> NDArray[np.float32]:
    """Return the rows that a model is asked for."""
    return np.random.default_rng(1).standard_normal((ROWS, *DIMS[net]), np.float32)


def weights() -> NDArray[np.float32]:
    """Return the matrix of the net ``wide``."""
    matrix = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), np.float32)
    return matrix / np.float32(np.sqrt(WIDTH))


def net_of(name: str, *, bf16: bool = False) -> Any:
    """Return a module of PyTorch. With ``bf16`` it computes in that type, and takes and returns float32."""
    import torch

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.from_numpy(weights()))

        def forward(self, X: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"OUT": torch.relu(X @ self.weights)}

    class InBf16(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner.bfloat16()

        def forward(self, X: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"OUT": self.inner(X.bfloat16())["OUT"].float()}

    torch.manual_seed(0)
    module = Wide() if name == "wide" else getattr(importlib.import_module(f"zoo.nets.{name}"), name.capitalize())()
    return (InBf16(module) if bf16 else module).eval()


def _answers(module: Any, net: str) -> NDArray[np.float32]:
    import torch

    with torch.inference_mode():
        computed: NDArray[np.float32] = module(torch.from_numpy(rows(net)))["OUT"].numpy()
    return computed


def exported(module: Any, example: tuple[Any, ...], most: int = ROWS) -> Any:
    """Return a program of ``torch.export`` whose batch may have up to ``most`` rows."""
    import torch

    batch = torch.export.Dim("batch", min=1, max=most)
    return torch.export.export(module, example, dynamic_shapes=tuple({0: batch} for _ in example))


def _example(net: str) -> tuple[Any]:
    import torch

    return (torch.from_numpy(rows(net)[:2]),)


def _exported(bf16: bool) -> Callable[[str, Path, bool], NDArray[np.float32]]:
    def write(net: str, version: Path, gpu: bool) -> NDArray[np.float32]:
        import torch

        module = net_of(net, bf16=bf16)
        torch.export.save(exported(module, _example(net)), version / "model.pt2")
        return _answers(module, net)

    return write


def _scripted(bf16: bool) -> Callable[[str, Path, bool], NDArray[np.float32]]:
    def write(net: str, version: Path, gpu: bool) -> NDArray[np.float32]:
        import torch

        module = net_of(net, bf16=bf16)
        torch.jit.trace(module, _example(net), strict=False).save(version / "model.pt")
        return _answers(module, net)

    return write


def _compiled(bf16: bool) -> Callable[[str, Path, bool], NDArray[np.float32]]:
    def write(net: str, version: Path, gpu: bool) -> NDArray[np.float32]:
        import torch

        module = net_of(net, bf16=bf16)
        computed = _answers(module, net)
        device = "cuda" if gpu else "cpu"
        program = exported(module.to(device), tuple(each.to(device) for each in _example(net)))
        torch._inductor.aoti_compile_and_package(program, package_path=str(version / "model.pt2"))
        return computed

    return write


def _module(net: str, version: Path, gpu: bool) -> NDArray[np.float32]:
    import torch

    module = net_of(net)
    torch.save(module.state_dict(), version / "model.pt")
    (version / "model.py").write_text(_AS_A_MODULE)
    return _answers(module, net)


def _python(net: str, version: Path, gpu: bool) -> NDArray[np.float32]:
    (version / "model.py").write_text(_IN_PYTHON)
    np.save(version / "weights.npy", weights())
    return np.maximum(rows(net) @ weights(), 0)


def _onnx(net: str, version: Path, gpu: bool) -> NDArray[np.float32]:
    import onnx
    from onnxruntime import InferenceSession

    import onnx_models

    proto, _ = onnx_models.cnn()
    onnx.save(proto, version / "model.onnx")
    session = InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    computed: NDArray[np.float32] = session.run(None, {"IN": rows(net)})[0]
    return computed


def _steps(net: str, version: Path, gpu: bool) -> NDArray[np.float32]:
    computed = rows(net)
    for _ in STEPS:
        computed = np.maximum(computed @ weights(), 0)
    return computed


def _engine(net: str, version: Path, gpu: bool) -> NDArray[np.float32]:
    """Write an engine of TensorRT, with a profile for up to 4 rows and one for up to 32."""
    import tensorrt as trt

    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    network = builder.create_network(0)
    given = network.add_input("X", trt.float32, (-1, WIDTH))
    values = weights()  # of which TensorRT keeps no copy
    matrix = network.add_constant((WIDTH, WIDTH), trt.Weights(values))
    none = trt.MatrixOperation.NONE
    product = network.add_matrix_multiply(given, none, matrix.get_output(0), none)
    out = network.add_activation(product.get_output(0), trt.ActivationType.RELU).get_output(0)
    out.name = "OUT"
    network.mark_output(out)
    config = builder.create_builder_config()
    for most in (4, ROWS):
        profile = builder.create_optimization_profile()
        profile.set_shape("X", (1, WIDTH), (most // 2, WIDTH), (most, WIDTH))
        config.add_optimization_profile(profile)
    (version / "model.plan").write_bytes(bytes(builder.build_serialized_network(network, config)))
    return np.maximum(rows(net) @ weights(), 0)


STEPS = ("exported_wide", "python", "scripted_wide")
"""Of the ensemble: an exported program, a Python model, and TorchScript."""


def _ensemble() -> str:
    tensors = ("X", "first", "second", "OUT")
    steps = ", ".join(
        f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "X" value: "{taken}" }} '
        f'output_map {{ key: "OUT" value: "{given}" }} }}'
        for name, taken, given in zip(STEPS, tensors, tensors[1:], strict=False)
    )
    return f'platform: "ensemble" ensemble_scheduling {{ step [ {steps} ] }}'


_TORCH = 'backend: "pytorch" dynamic_batching { }'
_ENGINE = 'backend: "tensorrt" optimization {{ cuda {{ graphs: {} }} }}'
_PROFILES = 'profile: [ "0", "1" ]'
_COMPILED = ("INPUT__0", "OUT")
_CARD = "it needs a card"
_SLOW = "its compiler takes too long on two processors"
CASES: dict[str, Case] = {
    "exported": Case("torch.export, float32", "torch", "cnn", _exported(False), _TORCH),
    "exported_bf16": Case("torch.export, bf16", "torch", "cnn", _exported(True), _TORCH, _BF16),
    "scripted": Case("TorchScript, float32", "torch", "cnn", _scripted(False), _TORCH),
    "scripted_bf16": Case("TorchScript, bf16", "torch", "cnn", _scripted(True), _TORCH, _BF16),
    "encoder": Case(
        "torch.export, a block of BERT's size, float32", "torch", "encoder", _exported(False), _TORCH,
        not_rehearsed="it is too large",
    ),
    "module": Case("module in Python, float32", "torch", "wide", _module, _TORCH),
    "exported_wide": Case("torch.export, one layer, float32", "torch", "wide", _exported(False), _TORCH),
    "scripted_wide": Case("TorchScript, one layer, float32", "torch", "wide", _scripted(False), _TORCH),
    "python": Case("Python model with PyTorch, float32", "torch", "wide", _python, 'backend: "python"'),
    "steps": Case("ensemble of torch.export, Python and TorchScript", "torch", "wide", _steps, _ensemble()),
    "onnx": Case(
        "ONNX Runtime, float32", "onnxruntime", "cnn", _onnx, 'backend: "onnxruntime"', names=("IN", "OUT"), columns=10
    ),
    "plain": Case(
        "TensorRT", "tensorrt", "wide", _engine, _ENGINE.format("false"), profiles=_PROFILES,
        not_rehearsed=_CARD,
    ),
    "graphs": Case(
        "TensorRT with CUDA graphs", "tensorrt", "wide", _engine, _ENGINE.format("true"), profiles=_PROFILES,
        not_rehearsed=_CARD,
    ),
    "compiled": Case(
        "AOTInductor, one layer, float32", "torch", "wide", _compiled(False), _TORCH, names=_COMPILED,
        not_rehearsed=_SLOW,
    ),
    "compiled_bf16": Case(
        "AOTInductor, one layer, bf16", "torch", "wide", _compiled(True), _TORCH, _BF16, names=_COMPILED,
        not_rehearsed=_SLOW,
    ),
}  # fmt: skip
"""By the name of the model, in the order in which they are written."""


def configuration(name: str, instances: str) -> str:
    """Return the configuration of a model."""
    case = CASES[name]
    taken, given = case.names
    dims = ", ".join(map(str, DIMS[case.net]))
    tensors = (
        f'input {{ name: "{taken}" data_type: TYPE_FP32 dims: [ {dims} ] }}\n'
        f'output {{ name: "{given}" data_type: TYPE_FP32 dims: [ {case.columns} ] }}\n'
    )
    return f"{case.config}\nmax_batch_size: {ROWS}\n{tensors}{'' if name == 'steps' else instances}"


def main(folder: Path, kind: str, names: list[str]) -> None:
    """Write models, and what a processor answers."""
    warnings.simplefilter("ignore")
    (folder / "answers").mkdir(exist_ok=True)
    for name in names:
        case, version = CASES[name], folder / "models" / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        computed = case.write(case.net, version, kind == "KIND_GPU")
        # The answers are there when the model is.
        unfinished = folder / "answers" / f"{name}.unfinished.npy"
        np.save(unfinished, computed)
        unfinished.rename(folder / "answers" / f"{name}.npy")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
