"""The command line of ``nerite add``."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nerite.cli.add.report import as_json, as_text, proposed
from nerite.cli.command import (
    add_repository,
    agreed,
    complain,
    new_parser,
    repository_of,
    show,
    show_json,
    somebody_is_there,
    status_of,
)
from nerite.cli.progress import Progress
from nerite.client import TensorDescription
from nerite.core import dtype as dtypes
from nerite.core.errors import NeriteError
from nerite.intake.addition import add
from nerite.intake.order import Order
from nerite.intake.outcome import Outcome

_PROGRAM = "nerite add"
_EPILOG = """\
What it is, is seen from its content: ONNX, TorchScript, torch.export and AOTInductor, safetensors (with --class),
OpenVINO, PaddlePaddle, SavedModel, LiteRT, XGBoost, LightGBM, treelite, scikit-learn (with --trust), Hugging Face,
TensorRT, MLflow, a model.py, or a model's directory from another repository.

It is loaded in a server of its own and measured there with random data, and put into the repository at the end, at
once: a server that looks at the repository never sees half of it. If anything fails, nothing has changed.

The exit status is 0 if it was added, 1 if it was not, 2 for a wrong command line, 130 after Ctrl-C.

Examples:
  nerite add resnet50.onnx
  nerite add model.pt2 --name detector --repository /srv/models
  nerite add new.onnx --name detector --version 2         another version of a model that is there
  nerite add script.pt --input x:FP32:-1,4 --output OUTPUT__0:FP32:-1,2
  nerite add weights.safetensors --class net.py:Net --input x:FP32:-1,4 --output OUTPUT__0:FP32:-1,2
  nerite add forest.pkl --trust
  nerite add bert.onnx --shape input_ids=128 --shape attention_mask=128 --yes
"""


def run(arguments: Sequence[str]) -> int:
    """Add a model; return the exit status."""
    return status_of(_PROGRAM, lambda: _add(_parser().parse_args(arguments)))


def _add(options: argparse.Namespace) -> int:
    # What is half done is put away when somebody ends us, too.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with Progress() as progress:
            outcome = add(_order(options), _Onlooker(options, progress))
    except NeriteError as error:
        if not options.json:
            raise
        show_json({"error": error.message}, one_line=True)
        return 1
    except KeyboardInterrupt:
        complain(_PROGRAM, "given up; nothing has changed.")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.json:
        show_json(as_json(outcome, placed=not options.dry_run))
    else:
        show(as_text(outcome, placed=not options.dry_run))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(_PROGRAM, "Bring a trained model into a model repository.", _EPILOG)
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="the file or directory that training has saved")
    where = parser.add_argument_group("where it goes")
    add_repository(where)
    where.add_argument("--name", default="", help="the model's name (default: after the file)")
    version = "its version (default: 1); of a model that is there, another one"
    where.add_argument("--version", metavar="N", type=_positive, help=version)
    force = "replace what is there: the version that --version names, else the whole model"
    where.add_argument("--force", action="store_true", help=force)
    what = parser.add_argument_group("what it is")
    what.add_argument(
        "--class", metavar="FILE.py:CLASS", dest="class_place", default="", help="the module that the weights are of"
    )
    what.add_argument("--flavor", default="", help="of an MLflow model: the flavour to take (default: the best)")
    trust = "run code that is in the model: to read a pickle, or a Hugging Face model with code of its own"
    what.add_argument("--trust", action="store_true", help=trust)
    for side, verb in (("input", "takes"), ("output", "gives")):
        what.add_argument(
            f"--{side}",
            metavar="NAME:TYPE:N,N",
            action="append",
            type=_tensor,
            default=[],
            help=f"what it {verb}, where the model does not tell, as in x:FP32:-1,4; a first size of -1 is the batch",
        )
    backend = "what is to run it (default: what its kind of file is for, or another that is faster)"
    what.add_argument("--backend", metavar="NAME", default="", help=backend)
    what.add_argument("--config", metavar="FILE", type=Path, help="take this config.pbtxt instead of making one")
    how = parser.add_argument_group("how it is tried")
    how.add_argument("--no-measure", action="store_true", help="load it, and do not measure it")
    how.add_argument(
        "--no-load", action="store_true", help="do not even load it: for a model that runs on other machines only"
    )
    how.add_argument(
        "--shape",
        metavar="INPUT=N,N",
        action="append",
        type=_shape,
        default=[],
        help="measure an input of free sizes with these, without the batch (default: 1); may be given several times",
    )
    how.add_argument(
        "--max-batch", metavar="N", type=_positive, default=64, help="the largest batch to measure (default: 64)"
    )
    how.add_argument("--yes", action="store_true", help="write the settings that are proposed, without asking")
    how.add_argument("--dry-run", action="store_true", help="do everything but put it into the repository")
    how.add_argument("--json", action="store_true", help="print what was found as JSON")
    return parser


def _order(options: argparse.Namespace) -> Order:
    return Order(
        options.artifact,
        repository_of(options),
        name=options.name,
        version=options.version,
        class_place=options.class_place,
        flavor=options.flavor,
        trusted=options.trust,
        config=options.config,
        backend=options.backend,
        inputs=tuple(options.input),
        outputs=tuple(options.output),
        force=options.force,
        load=not options.no_load,
        measure=not options.no_measure,
        place=not options.dry_run,
        largest_batch=options.max_batch,
        shapes=dict(options.shape),
    )


class _Onlooker:
    """Shows how far it has come, and asks whether a proposal is to be written."""

    def __init__(self, options: argparse.Namespace, progress: Progress) -> None:
        self._options = options
        self._progress = progress

    def copied(self, done: int, total: int) -> None:
        self._progress.bar("copying", done, total)

    def doing(self, what: str) -> None:
        self._progress.doing(what)

    def accepts(self, outcome: Outcome) -> bool:
        if self._options.yes:
            return True
        if self._options.json or not somebody_is_there():
            return False
        self._progress.clear()
        print(proposed(outcome))
        return agreed("Write these settings?", otherwise=True)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 1 on")
    return int(text)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = text.partition("=")
    try:
        if name and equals:
            return name, tuple(int(size) for size in sizes.split(",") if size)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is no shape: write INPUT=N,N")


def _tensor(text: str) -> TensorDescription:
    name, _, rest = text.partition(":")
    datatype, _, sizes = rest.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",") if size)
    except ValueError:
        shape = (0,)
    if not name or datatype not in dtypes.BY_NAME or any(size == 0 or size < -1 for size in shape):
        raise argparse.ArgumentTypeError(f"'{text}' is no tensor: write NAME:TYPE:N,N, as in x:FP32:-1,4")
    return TensorDescription(name, datatype, shape)


def _end(*_: object) -> NoReturn:
    raise SystemExit(143)
