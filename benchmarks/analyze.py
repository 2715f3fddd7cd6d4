"""What `nerite analyze` finds by its guided search, beside what it finds by measuring everything.

Three models: a network in ONNX that computes faster in batches, a model in Python that waits for something else, so
that instances count, and a forest of XGBoost. Each is analyzed exhaustively and by the guided search, with a checkpoint
of its own each. Then the two winners are measured again, in turns: what counts are the medians of these.

    python benchmarks/analyze.py [--rounds N] [--folder F] [--only MODEL] [--print]

With --folder it goes on where it was stopped. It takes about 20 minutes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import onnx
from page import command_line, machine, publish

from nerite.tools.analyze.finding import Goal
from nerite.tools.analyze.search import Subject, Subjects, Value
from nerite.tools.analyze.trial import Load, completed, measured
from nerite.tools.bench.measurement import Rule
from nerite.tools.bench.requests import TensorLoad
from onnx_models import wide_mlp

_LEVELS: Final = (4, 16)
_WARM_UP: Final = 0.2
_RULE: Final = Rule(seconds=0.3, most=6)
_CALLER = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        # As one that asks a database: a while for each batch, and a little more for each request.
        time.sleep(0.005 + 0.002 * len(requests))
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.as_numpy())]) for each in inputs]
"""
_CALLER_CONFIG = """\
backend: "python"
max_batch_size: 16
input { name: "IN" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 16 ] }
"""


def _write_network(model: Path) -> None:
    onnx.save(wide_mlp()[0], model / "1" / "model.onnx")
    (model / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 4\n')


def _write_caller(model: Path) -> None:
    (model / "1" / "model.py").write_text(_CALLER)
    (model / "config.pbtxt").write_text(_CALLER_CONFIG)


def _write_forest(model: Path) -> None:
    import xgboost
    from zoo.trees import samples

    options = {"objective": "binary:logistic", "max_depth": 8}
    xgboost.train(options, xgboost.DMatrix(*samples()), 3000).save_model(model / "1" / "xgboost.ubj")
    (model / "config.pbtxt").write_text('backend: "fil"\nmax_batch_size: 8\n')


class _Model(NamedTuple):
    write: Callable[[Path], None]
    values: tuple[str, ...]


_MODELS: Final = {
    "network": _Model(_write_network, ("max_batch=1,4,16,64",)),
    "caller": _Model(_write_caller, ("max_batch=1,4,16", "instances=1,2,4,8,16")),
    "forest": _Model(_write_forest, ("max_batch=1,8,64",)),
}


def repository(folder: Path) -> Path:
    """Return a repository with the models, which are written once: a checkpoint is of these files."""
    models = folder / "models"
    for name, model in _MODELS.items():
        if not (models / name / "config.pbtxt").exists():
            (models / name / "1").mkdir(parents=True, exist_ok=True)
            model.write(models / name)
    return models


def analyzed(folder: Path, name: str, search: str) -> dict[str, Any]:
    """Return what ``nerite analyze`` says of a model."""
    said = folder / f"{name}.{search}.json"
    if not said.exists():
        flags = [f"--warm-up={_WARM_UP}", f"--window={_RULE.seconds}", f"--windows={_RULE.most}"]
        flags += [f"--set={values}" for values in _MODELS[name].values]
        flags += [f"--checkpoint={folder / name}.{search}.jsonl", f"--json={said}", f"--search={search}"]
        flags += [f"--repository={folder / 'models'}", f"--concurrency={','.join(map(str, _LEVELS))}"]
        subprocess.run([sys.executable, "-m", "nerite.cli.main", "analyze", name, *flags], check=True)
    document: dict[str, Any] = json.loads(said.read_text())
    return document


def beside(folder: Path, name: str, winners: Sequence[Mapping[str, Value]], rounds: int) -> list[float]:
    """Return the answers a second of each of some configurations, measured in turns."""
    models = folder / "models"
    configs = completed(models, [name])
    subjects = Subjects((Subject.read(models / name, configs[name]),))
    load = Load((TensorLoad(name),), _LEVELS, _RULE, _WARM_UP)
    rates: list[list[float]] = [[] for _ in winners]
    for number in range(rounds):
        # Nobody is always the first.
        for at in sorted(range(len(winners)), reverse=bool(number % 2)):
            found = measured(models, subjects.texts(winners[at]), winners[at], load, _LEVELS, lambda look: None)
            if found.refused:
                raise RuntimeError(found.refused)
            rates[at].append(Goal().best_figure(found).rate)
    return list(map(statistics.median, rates))


def _row(folder: Path, name: str, rounds: int) -> str:
    documents = [analyzed(folder, name, search) for search in ("brute", "guided")]
    brute, guided = documents
    best = [document["findings"][0]["changes"] for document in documents]
    kept = folder / f"{name}.beside.json"
    if not kept.exists():
        kept.write_text(json.dumps(beside(folder, name, best, rounds)))
    there, here = json.loads(kept.read_text())
    told = [" ".join(f"{key}={value}" for key, value in each.items()) or "as it was" for each in best]
    part = guided["measurements"] / brute["measurements"]
    return (
        f"| {name} | {brute['configurations']} | {brute['measurements']} | {guided['measurements']} | {part:.0%} "
        f"| {told[0]} | {there:,.0f} | {told[1]} | {here:,.0f} | **{here / there:.2f}** |"
    )


def report(folder: Path, names: Sequence[str], rounds: int) -> str:
    """Measure what is not measured yet; return a table."""
    repository(folder)
    rows = [_row(folder, name, rounds) for name in names]
    return "\n".join(
        [
            f"Measured on {machine()}; windows of {_RULE.seconds} s at concurrency {' and '.join(map(str, _LEVELS))}; "
            f"the winners {rounds} times, in turns; requests a second.",
            "",
            "| | configurations | measurements, all | guided | part | best of all | again | best of guided | again "
            "| ratio |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Read the command line, measure, and write or print the section."""
    flags = command_line(__doc__, 0.0, 5)
    flags.add_argument("--folder", type=Path, help="where models and checkpoints are kept")
    flags.add_argument("--only", choices=_MODELS, help="this model alone, whose row is printed")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        text = report(folder, [given.only] if given.only else list(_MODELS), given.rounds)
    given.print = given.print or bool(given.only)
    publish("analyze", text, given)


if __name__ == "__main__":
    main()
