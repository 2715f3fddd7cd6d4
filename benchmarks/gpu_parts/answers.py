"""Whether the answers of every framework that is there are those of a processor."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray

from gpu_parts.answer_models import CASES, Case, configuration, rows
from gpu_parts.part import Part, Program, Skipped
from serving import Serving

_SIZES = (1, 2, 4, 5, 32, 1)
"""Of batches. An engine has one profile for those up to 4, and another one for the others."""
_TURNS = 3
"""A CUDA graph is captured when shapes are there for the second time, and run from the third."""


def run(part: Part) -> None:
    """Have the models written, each as soon as its turn comes served and asked."""
    there = [name for name in CASES if why_not(part, CASES[name]) == ""]
    # Compilers take long, and nothing of the others.
    apart = [name for name in there if name.startswith("compiled")]
    together = [name for name in there if name not in apart]
    (part.folder / "models").mkdir()
    for name in there:
        config = part.folder / "models" / name / "config.pbtxt"
        config.parent.mkdir(parents=True)
        config.write_text(configuration(name, part.instances(more=CASES[name].profiles)))
    writing: dict[str, Program] = {}
    for names in filter(None, (together, *([name] for name in apart))):
        writing |= dict.fromkeys(names, written(part, names))
    # Products in TF32 would differ by 1e-3.
    exact = {"NVIDIA_TF32_OVERRIDE": "0"}
    with part.server(part.folder / "models", "--model-control-mode=explicit", environment=exact) as server:
        for name, case in CASES.items():
            with part.attempt(case.title):
                if why := why_not(part, case):
                    raise Skipped(why)
                answer = part.folder / "answers" / f"{name}.npy"
                while not answer.exists():
                    writing[name].check()
                    time.sleep(0.05)
                part.figure(f"{case.title}: difference", difference(server, name, np.load(answer)), "",
                            f"<= {case.tolerance:g}")  # fmt: skip
        if "plain" in there:
            with part.attempt("TensorRT without a configuration"):
                completed(part, server)


def why_not(part: Part, case: Case) -> str:
    """Return why a model cannot be tried here; empty if it can."""
    if case.not_rehearsed and not part.gpu:
        return f"not rehearsed here: {case.not_rehearsed}"
    if importlib.util.find_spec(case.package) is None:
        return f"{case.package} is not installed"
    if part.gpu and case.package == "onnxruntime":
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return "onnxruntime is a CPU build"
    return ""


def written(part: Part, names: Sequence[str]) -> Program:
    """Begin to write models."""
    return part.program(sys.executable, "-m", "gpu_parts.answer_models", part.folder, part.result.kind, *names)


def difference(server: Serving, name: str, expected: NDArray[np.float32]) -> float:
    """Load a model, and return how much its answers differ, in proportion to the largest."""
    status, _, body = server.ask("POST", f"/v2/repository/models/{name}/load", {})
    if status != 200:
        raise RuntimeError(body.decode())
    case, found = CASES[name], 0.0
    given, (input_name, output_name) = rows(case.net), case.names
    for turn in range(_TURNS):
        library, url = ((tritonclient.http, server.http), (tritonclient.grpc, server.grpc))[turn % 2]
        with library.InferenceServerClient(url) as client:
            for size in _SIZES:
                tensor = library.InferInput(input_name, [size, *given.shape[1:]], "FP32")
                tensor.set_data_from_numpy(given[:size])
                answer = client.infer(name, [tensor]).as_numpy(output_name)
                found = max(found, float(np.abs(answer - expected[:size]).max()))
    return found / float(np.abs(expected).max())


def completed(part: Part, server: Serving) -> None:
    """Serve an engine without a configuration."""
    models = part.folder / "models"
    (models / "completed" / "1").mkdir(parents=True)
    Path(models / "completed" / "1" / "model.plan").hardlink_to(models / "plain" / "1" / "model.plan")
    status, _, body = server.ask("POST", "/v2/repository/models/completed/load", {})
    if status != 200:
        raise RuntimeError(body.decode())
    config = server.json("GET", "/v2/models/completed/config")
    names = [[each["name"] for each in config[side]] for side in ("input", "output")]
    part.figure("TensorRT: the configuration is completed from the engine", names == [["X"], ["OUT"]], "", "== 1")
