"""The two networks, as PyTorch, ONNX Runtime, OpenVINO, TensorFlow and LiteRT have them: the same weights in all."""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from zoo.contestant import ROWS, Call, Contestant, parameter, tensors

_BATCHES = {"cnn": (1, 8, 32), "encoder": (1, 8)}
_MODULES = {"cnn": "Cnn", "encoder": "Encoder"}


def net(model: str) -> Any:
    """Return the module of PyTorch, with its weights; one thread from now on."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return getattr(importlib.import_module(f"zoo.nets.{model}"), _MODULES[model])().eval()


def _example(model: str) -> tuple[Any]:
    import torch

    return (torch.zeros(2, *ROWS[model]),)


def _torch_call(module: Any) -> Call:
    import torch

    def call(rows: Any) -> Any:
        with torch.inference_mode():
            return module(torch.from_numpy(rows))["OUT"].numpy()

    return call


def _write_exported(model: str, version: Path) -> None:
    import torch

    batch = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(net(model), _example(model), dynamic_shapes=batch), version / "model.pt2")


def _open_exported(model: str, version: Path) -> Call:
    import torch

    torch.set_num_threads(1)
    return _torch_call(torch.export.load(version / "model.pt2").module())


def _write_scripted(model: str, version: Path) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(net(model), _example(model), strict=False).save(version / "model.pt")


def _open_scripted(model: str, version: Path) -> Call:
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return _torch_call(torch.jit.load(version / "model.pt"))


def _write_eager(model: str, version: Path) -> None:
    from safetensors.torch import save_file

    shutil.copy(Path(__file__).parent / "nets" / f"{model}.py", version / "model.py")
    save_file(net(model).state_dict(), version / "model.safetensors")


def _open_eager(model: str, version: Path) -> Call:
    return _torch_call(net(model))


def _write_onnx(model: str, version: Path) -> None:
    import torch

    class Single(torch.nn.Module):
        """What is traced: one result, without a name."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = net(model)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)["OUT"]

    names = {"input_names": ["X"], "output_names": ["OUT"], "dynamic_axes": {"X": {0: "N"}, "OUT": {0: "N"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # The other exporter needs a package more.
        torch.onnx.export(Single().eval(), _example(model), version / "model.onnx", dynamo=False, **names)


def _open_onnx(model: str, version: Path) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(version / "model.onnx", options, providers=["CPUExecutionProvider"])
    return lambda rows: session.run(None, {"X": rows})[0]


def _write_openvino(model: str, version: Path) -> None:
    from nerite.frameworks.openvino.graph import openvino

    _write_onnx(model, version)
    openvino().save_model(openvino().convert_model(version / "model.onnx"), version / "model.xml")
    (version / "model.onnx").unlink()


def _open_openvino(model: str, version: Path) -> Call:
    from nerite.frameworks.openvino.graph import openvino

    options = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
    request = openvino().Core().compile_model(version / "model.xml", "CPU", options).create_infer_request()

    def call(rows: Any) -> Any:
        request.infer([rows], share_inputs=True, share_outputs=True)
        return request.get_output_tensor(0).data

    return call


def _tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow

    return tensorflow


def _write_saved_model(model: str, version: Path) -> None:
    from zoo.tensorflow_nets import function

    tf = _tensorflow()
    module = tf.Module()
    module.body = function(tf, model, net(model).state_dict())
    tf.saved_model.save(module, version / "model.savedmodel", signatures=module.body)


def _open_saved_model(model: str, version: Path) -> Call:
    tf = _tensorflow()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    module = tf.saved_model.load(version / "model.savedmodel")
    served = module.signatures["serving_default"]

    def call(rows: Any, kept: Any = module) -> Any:
        return served(X=tf.constant(rows))["OUT"].numpy()

    return call


def _write_lite(model: str, version: Path) -> None:
    tf = _tensorflow()
    _write_saved_model(model, version)
    lite = tf.lite.TFLiteConverter.from_saved_model(str(version / "model.savedmodel")).convert()
    (version / "model.tflite").write_bytes(lite)
    shutil.rmtree(version / "model.savedmodel")


def _open_lite(model: str, version: Path) -> Call:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(version / "model.tflite"), num_threads=1)
    runner = interpreter.get_signature_runner()
    return lambda rows: runner(X=rows)["OUT"]


_TORCH = 'backend: "pytorch"\n' + parameter("INTRA_OP_THREAD_COUNT", "1")
_ORT = 'backend: "onnxruntime"\n' + parameter("intra_op_thread_count", "1") + parameter("inter_op_thread_count", "1")
_OPENVINO = 'backend: "openvino"\n' + parameter("INFERENCE_NUM_THREADS", "1")
_TF = 'backend: "tensorflow"\n' + parameter("TF_NUM_INTRA_THREADS", "1") + parameter("TF_NUM_INTER_THREADS", "1")
_LITE = 'backend: "litert"\n' + parameter("num_threads", "1")


def _torch_with_tensors(model: str) -> str:
    return _TORCH + tensors(model)


def _torch_in_python(model: str) -> str:
    return _torch_with_tensors(model) + parameter("MODEL_CLASS", _MODULES[model])


NEURAL = (
    Contestant("pytorch, exported", _BATCHES, _write_exported, _open_exported, lambda model: _TORCH),
    Contestant("pytorch, TorchScript", _BATCHES, _write_scripted, _open_scripted, _torch_with_tensors),
    Contestant("pytorch, Python", _BATCHES, _write_eager, _open_eager, _torch_in_python),
    Contestant("onnxruntime", _BATCHES, _write_onnx, _open_onnx, lambda model: _ORT),
    Contestant("openvino", _BATCHES, _write_openvino, _open_openvino, lambda model: _OPENVINO),
    Contestant("tensorflow", _BATCHES, _write_saved_model, _open_saved_model, lambda model: _TF),
    Contestant("litert", _BATCHES, _write_lite, _open_lite, lambda model: _LITE),
)
