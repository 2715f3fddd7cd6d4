"""Artifacts as frameworks write them, and what becomes of them on the way."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def onnx_model(path: Path, *, external: bool = False) -> Path:
    """y = x * w, with w in a file beside it if it is ``external``."""
    weights = numpy_helper.from_array(np.full((1, 64), 2, np.float32), "w")
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 64]) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])], "graph", tensors[:1], tensors[1:], [weights]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, path, save_as_external_data=external, location="weights.bin", size_threshold=0)
    return path


def torch_files(folder: Path) -> None:
    """TorchScript, an exported program, and three files that are no programs."""
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()).eval()
    batch = torch.export.Dim("n")
    exported = torch.export.export(module, (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(exported, folder / "exported.pt2")
    torch.save(module.state_dict(), folder / "weights.pt")
    torch.save(module, folder / "module.pt")
    torch.save(module.state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.trace(module, torch.zeros(1, 4)), folder / "script.pt")


def safetensors_file(path: Path) -> Path:
    from safetensors.numpy import save_file

    save_file({"0.weight": np.zeros((2, 4), np.float32), "0.bias": np.zeros(2, np.float32)}, path)
    return path


def openvino_model(path: Path) -> Path:
    """A graph with weights in the file beside it."""
    import openvino
    from openvino import opset13

    x = opset13.parameter([-1, 4], np.float32, name="x")
    product = opset13.matmul(x, opset13.constant(np.ones((4, 2), np.float32)), False, False)
    openvino.save_model(openvino.Model([product], [x], "m"), path, compress_to_fp16=False)
    return path


def tar(path: Path, **files: str) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("_yaml", ".yaml"))
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def hugging_face(folder: Path, **described: Any) -> Path:
    """A directory of transformers with the files that matter, and one that does not."""
    folder.mkdir(exist_ok=True)
    document = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **described}
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("about it")
    safetensors_file(folder / "model.safetensors")
    return folder
