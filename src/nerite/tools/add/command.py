"""``nerite add``: its command line, and the report about the added model as text and as JSON."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from nerite.cli.command import (
    ProgressBar,
    UsageError,
    add_repeated,
    agreed,
    complain,
    is_interactive,
    megabytes,
    new_parser,
    positive_integer,
    show,
    show_json,
    status_of,
)
from nerite.client import ModelDescription, TensorDescription
from nerite.config.json_form import to_json
from nerite.config.loading import CONFIG_FILE
from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError
from nerite.core.text import render_table, terminal_width
from nerite.functions.function_source import FunctionSource
from nerite.functions.model_directory import write_in_subprocess
from nerite.sources.fetching import ModelFetcher, TerminalWatcher
from nerite.sources.name import parse_bare_name, parse_name
from nerite.sources.serving import served_name
from nerite.tools.add.addition import add_model
from nerite.tools.add.destination import add_repository, repository_of
from nerite.tools.add.order import LANGUAGE_MODELS, AddOrder, AddOutcome, Watcher
from nerite.tools.add.proposal import Latency
from nerite.tools.trial_inputs import add_shape_option, shape_option


def as_text(outcome: AddOutcome, *, placed: bool) -> str:
    """Return the report as text; ``placed``: the model is in the repository."""
    target = outcome.destination
    artifact = outcome.artifact
    lines = [f"{outcome.source or artifact.source}: {artifact.kind}, {megabytes(artifact.size)}"]
    versions = ", ".join(map(str, artifact.versions)) or str(target.version)
    several = "versions" if len(artifact.versions) > 1 else "version"
    done = "Added" if placed else "Would be added"
    lines.append(f"{done} as model '{target.name}', {several} {versions}, in {target.repository}.")
    if outcome.signature is not None:
        lines += [f"  input   {tensor}" for tensor in outcome.signature.inputs]
        lines += [f"  output  {tensor}" for tensor in outcome.signature.outputs]
        lines.append(_loaded(outcome))
    if outcome.latencies:
        lines.append(_measured(outcome))
    if outcome.proposal is not None and outcome.proposal.advice:
        lines.append(proposed(outcome))
        lines.append(_written(outcome))
    lines += outcome.remarks
    if placed:
        lines.append(f"Serve it:  nerite serve {shlex.quote(str(target.repository))}")
        lines.append(f"Try it:    {shlex.join(example_command(outcome))}")
    return "\n".join(lines)


_NAME: Final = "NAME"
_URL: Final = "localhost:8000/v1"
_TRIES: Final = {
    "transcribe": ["curl", f"{_URL}/audio/transcriptions", "-F", f"model={_NAME}", "-F", "file=@recording.wav"],
    "text_to_speech": [
        "curl", f"{_URL}/audio/speech", "-d", f'{{"model": "{_NAME}", "input": "Good morning."}}', "-o", "speech.wav",
    ],
    "text_to_image": [
        "curl", f"{_URL}/images/generations", "-d", f'{{"model": "{_NAME}", "prompt": "a sea snail"}}',
        "-o", "image.json",
    ],
}  # fmt: skip
"""Commands that run models of speech and images."""


def task_of(signature: ModelDescription) -> str:
    """Return the task of a model of speech or images, by its tensors; empty for others."""
    inputs = {tensor.name: tensor.datatype for tensor in signature.inputs}
    outputs = {tensor.name: tensor.datatype for tensor in signature.outputs}
    if inputs.get("audio") == "FP32" and outputs.get("text_output") == "BYTES":
        return "transcribe"
    if inputs.get("text_input") != "BYTES":
        return ""
    speaks, paints = outputs.get("audio") == "FP32", outputs.get("image") == "BYTES"
    return "text_to_speech" if speaks else "text_to_image" if paints else ""


def example_command(outcome: AddOutcome) -> list[str]:
    """Return a command that runs the model on a server."""
    name, signature, policy = outcome.destination.name, outcome.signature, outcome.config.model_transaction_policy
    task = outcome.artifact.task if signature is None else task_of(signature)
    if task in _TRIES:
        return [word.replace(_NAME, name) for word in _TRIES[task]]
    if outcome.config.backend == LANGUAGE_MODELS if signature is None else signature.generates_text:
        return ["nerite", "chat", name]
    command = ["nerite", "client", "infer", name, "--random"]
    for tensor, sizes in outcome.example_shapes.items():
        command += shape_option(tensor, sizes).split(" ", 1)
    if policy is not None and policy.decoupled:
        command.append("--stream")
    if outcome.config.sequence_batching is not None:
        command += ["--parameter", "sequence_id=1", "--parameter", "sequence_start=true"]
    return command


def proposed(outcome: AddOutcome) -> str:
    """Return a table of the proposed settings and their reasons."""
    assert outcome.proposal is not None
    rows = [(each.setting, each.value or "omit", each.reason) for each in outcome.proposal.advice]
    return render_table(("Setting", "Proposed", "Reason"), rows, terminal_width())


def as_json(outcome: AddOutcome, *, placed: bool) -> dict[str, Any]:
    """Return the report as a JSON-serialisable document."""
    target, signature, proposal = outcome.destination, outcome.signature, outcome.proposal
    tensors: dict[str, Any] = {}
    if signature is not None:
        for side, described in (("inputs", signature.inputs), ("outputs", signature.outputs)):
            tensors[side] = [
                {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)} for tensor in described
            ]
    return {
        "model": target.name,
        "versions": [*outcome.artifact.versions] or [target.version],
        "repository": str(target.repository),
        "placed": placed,
        "source": outcome.source or str(outcome.artifact.source),
        "kind": outcome.artifact.kind,
        "bytes": outcome.artifact.size,
        **tensors,
        "load_seconds": round(outcome.load_seconds, 3),
        "memory_bytes": outcome.memory,
        "memory_at_work_bytes": outcome.memory_at_work,
        "latencies": _latencies(outcome.latencies),
        "rivals": [{"backend": rival.backend, "latencies": _latencies(rival.latencies)} for rival in outcome.rivals],
        "instances": [
            {
                "count": each.instances,
                "per_second": round(each.per_second, 1),
                "repeats": [round(rate, 1) for rate in each.rates],
            }
            for each in outcome.throughputs
        ],
        "proposal": [
            {"setting": each.setting, "value": each.value or None, "reason": each.reason}
            for each in (proposal.advice if proposal is not None else ())
        ],
        "accepted": outcome.accepted,
        "config": to_json(outcome.config),
        "remarks": outcome.remarks,
    }


def _loaded(outcome: AddOutcome) -> str:
    text = f"Loaded in {outcome.load_seconds:.1f} s"
    if outcome.memory:
        text += f", using {megabytes(outcome.memory)} of memory"
        if outcome.latencies:
            text += f", and {megabytes(outcome.memory_at_work)} more after the largest batch"
    return f"{text}."


def _latencies(measured: Sequence[Latency]) -> list[dict[str, Any]]:
    return [
        {"batch": each.batch, "ms": round(each.ms, 3), "compute_ms": round(each.compute_ms, 3)} for each in measured
    ]


def _measured(outcome: AddOutcome) -> str:
    header = ("Batch", "Latency ms", "Compute ms", "Inferences/s")
    own = [_row(each) for each in outcome.latencies]
    if not outcome.rivals:
        return render_table(header, own, terminal_width())
    rows = [(outcome.artifact.config.backend, *row) for row in own]
    for rival in outcome.rivals:
        rows += [(rival.backend, *_row(each)) for each in rival.latencies]
    return render_table(("Backend", *header), rows, terminal_width())


def _row(each: Latency) -> tuple[str, ...]:
    return str(each.batch), f"{each.ms:.2f}", f"{each.compute_ms:.2f}", f"{each.per_second:,.0f}"


def _written(outcome: AddOutcome) -> str:
    file = outcome.destination.directory / CONFIG_FILE
    if outcome.accepted:
        return f"These settings were written to {file}."
    if outcome.artifact.finished or outcome.destination.joins:
        return f"These settings were not written, to keep the existing {file}."
    return f"These settings were not written to {file}, as you said no."


_PROGRAM = "nerite add"
_EPILOG = """\
The kind of model is recognised by its content: ONNX, TorchScript, torch.export and AOTInductor, safetensors (with
--class), OpenVINO, PaddlePaddle, SavedModel, LiteRT, XGBoost, LightGBM, treelite, scikit-learn (with --trust), Hugging
Face, GGUF, TensorRT, MLflow, TorchServe, a model.py, a function (FILE.py:NAME), or a model directory from another
repository. A name is fetched first: hf:ORG/NAME@REVISION, mlflow:URI, s3://bucket/path.

The model is loaded in a trial server, measured there with random data, and then moved into the repository atomically:
a server that reads the repository never sees an incomplete model. If anything fails, nothing is changed.

The settings that follow from the measurements are written into config.pbtxt: on a terminal after a question, elsewhere
unless --no is given.

The exit status is 0 if the model was added, 1 if it was not, 2 for an invalid command line, 130 after Ctrl-C.

Examples:
  nerite add resnet50.onnx
  nerite add model.pt2 --name detector --model-repository /srv/models
  nerite add new.onnx --name detector --version 2         add a version to an existing model
  nerite add script.pt --input x:FP32:-1,4 --output OUTPUT__0:FP32:-1,2
  nerite add weights.safetensors --class net.py:Net --input x:FP32:-1,4 --output OUTPUT__0:FP32:-1,2
  nerite add forest.pkl --trust
  nerite add hf:Qwen/Qwen3-0.6B                           a model of the Hugging Face hub
  nerite add app.py:double                                a function that @nerite.model decorates
  nerite add bert.onnx --shape input_ids:384 --shape attention_mask:384 --yes
"""


def run(arguments: Sequence[str]) -> int:
    """Add a model; return the exit status."""
    return status_of(_PROGRAM, lambda: _add_artifact(command_parser().parse_args(arguments)))


def _add_artifact(options: argparse.Namespace) -> int:
    if options.shape and (options.no_measure or options.no_load):
        given = "--no-load" if options.no_load else "--no-measure"
        raise UsageError(f"--shape has no effect with {given}: it is the shape to measure.", remedy=f"Omit {given}.")
    with _artifact(options):
        return _add(options)


def _add(options: argparse.Namespace) -> int:
    # Exit through SystemExit on SIGTERM, so that staged files are removed.
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        with ProgressBar() as progress:
            outcome = add_model(_order(options), _InteractiveWatcher(options, progress))
    except NeriteError as error:
        if not options.json:
            raise
        show_json({"error": error.message}, one_line=True)
        return 1
    except KeyboardInterrupt:
        complain(_PROGRAM, "cancelled; nothing was changed.")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.json:
        show_json(as_json(outcome, placed=not options.dry_run))
    else:
        show(as_text(outcome, placed=not options.dry_run))
    return 0


@contextmanager
def _artifact(options: argparse.Namespace) -> Iterator[None]:
    """Fetch a model that is named, or write the directory of a function, to be added. Raises ``NeriteError``."""
    text, options.artifact, options.origin = options.artifact, Path(options.artifact), ""
    if options.artifact.exists():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="nerite-add-") as folder:
        source = FunctionSource.parse(text)
        if (name := parse_name(text) or parse_bare_name(text)) is not None:
            watcher = TerminalWatcher(consent=options.yes)
            settings = {"offline": options.offline, "trusted": options.trust}
            with ModelFetcher(os.environ, Path(folder), watcher, **settings) as fetcher:
                found = fetcher.fetch(name)
                options.artifact, options.origin = found.path, found.origin
                options.name = options.name or served_name(found.name)
                yield
        elif source is not None and source.name:
            (written,) = write_in_subprocess(source, Path(folder), copy=True)
            options.artifact = Path(folder, written)
            yield
        else:
            yield


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of ``nerite add``."""
    parser = new_parser(_PROGRAM, "Add a trained model to a model repository.", _EPILOG)
    artifact = "file or directory that training has saved, or the name of a model to fetch"
    parser.add_argument("artifact", metavar="ARTIFACT", help=artifact)
    where = parser.add_argument_group("destination")
    add_repository(where)
    where.add_argument("--name", default="", help="name of the model (default: derived from the file)")
    version = "version number (default: 1); required to add a version to an existing model"
    where.add_argument("--version", metavar="N", type=positive_integer, help=version)
    force = "replace the version named by --version if it exists, or else the whole model"
    where.add_argument("--force", action="store_true", help=force)
    what = parser.add_argument_group("model")
    what.add_argument(
        "--class", metavar="FILE.py:CLASS", dest="class_place", default="", help="class that the weights belong to"
    )
    what.add_argument("--flavor", default="", help="flavour of an MLflow model to use (default: the best)")
    offline = "download nothing from the Hugging Face hub or an object store: use what is on this machine"
    what.add_argument("--offline", action="store_true", help=offline)
    trust = "allow running code that the model contains: pickles, and Hugging Face models with their own code"
    what.add_argument("--trust", action="store_true", help=trust)
    for side in ("input", "output"):
        tensor = f"an {side} that the model does not describe itself, as in x:FP32:-1,4; a leading -1 is the batch"
        add_repeated(what, f"--{side}", "NAME:TYPE:N,N", tensor, _tensor)
    backend = "backend to use (default: that of this kind of file, or a faster one)"
    what.add_argument("--backend", metavar="NAME", default="", help=backend)
    what.add_argument("--config", metavar="FILE", type=Path, help="use this config.pbtxt instead of generating one")
    how = parser.add_argument_group("trial")
    how.add_argument("--no-measure", action="store_true", help="load the model, but do not measure it")
    how.add_argument(
        "--no-load", action="store_true", help="do not load the model, for one that only runs on other machines"
    )
    add_shape_option(how)
    batch = "largest batch to measure (default: 64)"
    how.add_argument("--max-batch", metavar="N", type=positive_integer, default=64, help=batch)
    answer = how.add_mutually_exclusive_group()
    yes = "write the proposed settings without asking, as is done without a terminal"
    answer.add_argument("--yes", action="store_true", help=yes)
    answer.add_argument("--no", action="store_true", help="do not write the proposed settings, only report them")
    how.add_argument("--dry-run", action="store_true", help="do everything except add the model to the repository")
    how.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _order(options: argparse.Namespace) -> AddOrder:
    return AddOrder(
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
        origin=options.origin,
    )


class _InteractiveWatcher(Watcher):
    """Shows a progress bar, and asks the user whether to write the proposed settings."""

    def __init__(self, options: argparse.Namespace, progress: ProgressBar) -> None:
        self._options = options
        self._progress = progress

    def copied(self, done: int, total: int) -> None:
        self._progress.bar("copying", done, total)

    def doing(self, what: str) -> None:
        self._progress.doing(what)

    def accepts(self, outcome: AddOutcome) -> bool:
        if self._options.no:
            return False
        if self._options.yes or self._options.json or not is_interactive():
            return True
        self._progress.clear()
        print(proposed(outcome))
        return agreed("Write these settings?", otherwise=True)


def _tensor(text: str) -> TensorDescription:
    name, _, rest = text.partition(":")
    datatype, _, sizes = rest.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",") if size)
    except ValueError:
        shape = (0,)
    if not name or datatype not in dtypes.BY_NAME or any(size == 0 or size < -1 for size in shape):
        raise argparse.ArgumentTypeError(f"'{text}' is not a tensor: write NAME:TYPE:N,N, as in x:FP32:-1,4")
    return TensorDescription(name, datatype, shape)


def _exit(*_: object) -> NoReturn:
    raise SystemExit(143)
