"""The exam on a machine with a GPU: what the documentation says of GPUs is shown here, or is not verified.

    python3 benchmarks/gpu_exam.py --out FOLDER [--kit build/gpu-kit] [--only PART ...]

Parts run one after the other, each in processes of its own and within a limit of time, eight minutes together. Each
writes FOLDER/PART.json, again with every figure; a part that hangs or crashes keeps what it had, and the next one runs.
Logs of its servers are beside it. The exit status is 1 if a part failed or was cut.

With --kit, a folder that `make gpu-kit` has filled, the environment is made of it and of the packages of this Python,
without a network. --kind=KIND_CPU rehearses on processors, with small shapes; its figures say nothing of a GPU.
benchmarks/gpu_page.py makes docs/gpus.md of the results.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpu_parts import PARTS
from gpu_parts.environment import SOURCE, Kit, created, revision
from gpu_parts.result import PartResult

SECONDS = 480.0
"""For all parts together, with the making of the environment."""
_DRIVER = Path("/proc/driver/nvidia/version")
_GRACE = 8.0
"""Seconds in which the servers of a part that is cut may end by themselves."""
_SHOWN = 200
"""Characters of a reason in the summary. The files have all."""
_PR_SET_CHILD_SUBREAPER = 36


class Exam(NamedTuple):
    """What is the same for all parts of a run."""

    options: argparse.Namespace
    out: Path
    revision: str
    until: float
    """When it is to be over, as ``time.monotonic`` has it."""


def main() -> int:
    """Run the parts that are asked for; return the exit status."""
    options = command_line().parse_args()
    if options.part:
        return run_part(options)
    if options.kind == "KIND_GPU" and not _DRIVER.exists() and shutil.which("nvidia-smi") is None:
        print("this machine has no NVIDIA driver; --kind=KIND_CPU rehearses on processors", file=sys.stderr)
        return 2
    kit = Kit(options.kit.resolve()) if options.kit is not None else None
    exam = Exam(options, options.out.resolve(), revision(kit), time.monotonic() + options.seconds)
    exam.out.mkdir(parents=True, exist_ok=True)
    # What outlives a part that is cut becomes a child of this process.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as name:
        python, environment = environment_of(options, kit, Path(name, "venv"))
        results = []
        for part in options.only or PARTS:
            print(f"{part}: {PARTS[part].title}", flush=True)
            results.append(result := examined(part, exam, python, environment))
            why = f": {result.why}" if result.why else ""
            print(f"{part}: {result.outcome} in {result.seconds:.0f} s of {result.limit:.0f}{why}\n", flush=True)
    print(summary(results), flush=True)
    return 1 if any(result.outcome in ("failed", "cut") for result in results) else 0


def command_line() -> argparse.ArgumentParser:
    """Return the flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--out", type=Path, required=True, help="folder for the results")
    flags.add_argument("--kind", choices=["KIND_GPU", "KIND_CPU"], default="KIND_GPU", help="what models run on")
    flags.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"just these: {', '.join(PARTS)}")
    flags.add_argument("--seconds", type=float, default=SECONDS, help="limit of all parts together (%(default)g)")
    flags.add_argument("--kit", type=Path, help="make the environment of this folder (default: the present one)")
    flags.add_argument("--venv", type=Path, help="where to make it, and keep it")
    flags.add_argument("--wheels", type=Path, default=[], action="append", help="a further folder of packages")
    flags.add_argument("--isolated", action="store_true", help="see no packages of this Python")
    flags.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return flags


def environment_of(options: argparse.Namespace, kit: Kit | None, folder: Path) -> tuple[Path, dict[str, str]]:
    """Return the Python that runs the parts, and their environment variables."""
    environment = {**os.environ, "NERITE_TESTS_FORK": "0", "PYTHONUNBUFFERED": "1"}
    path = [str(SOURCE), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    if kit is None:
        if not Path(sys.executable).with_name("nerite").exists():
            sys.exit(f"no nerite beside {sys.executable}: pip install --editable '.[gpu,pytriton]', or use --kit")
        return Path(sys.executable), environment
    began = time.monotonic()
    python = created(kit, (options.venv or folder).resolve(), options.wheels, isolated=options.isolated)
    environment["PATH"] = os.pathsep.join([str(kit.programs), environment.get("PATH", os.defpath)])
    print(f"environment of {kit.folder}: {time.monotonic() - began:.0f} s\n", flush=True)
    return python, environment


def examined(part: str, exam: Exam, python: Path, environment: dict[str, str]) -> PartResult:
    """Run a part in processes of its own; return its result."""
    entry, file = PARTS[part], exam.out / f"{part}.json"
    began = time.monotonic()
    limit = round(max(0.0, min(entry.seconds, exam.until - began)), 1)
    now = datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes")
    command = shlex.join(["python3", *sys.argv])
    result = PartResult(part, exam.options.kind, command, now, exam.revision, limit)
    if entry.not_yet:
        result.outcome, result.why = "skipped", entry.not_yet
    elif not limit:
        result.why = "no time was left for it"
    result.save(file)
    if result.why:
        return result
    with tempfile.TemporaryDirectory() as folder:
        words = [str(python), str(Path(__file__).resolve()), f"--part={part}", f"--out={exam.out}"]
        words += [f"--kit={exam.options.kit.resolve()}"] if exam.options.kit is not None else []
        within = {**environment, "TMPDIR": folder}
        with subprocess.Popen(words, env=within, start_new_session=True) as process:
            try:
                status = process.wait(limit)
                why = f"its process ended with status {status}" if status else ""
            except subprocess.TimeoutExpired:
                why = f"it takes longer than {limit:.0f} s"
            finally:
                end_all(process.pid)
    result = PartResult.load(file)
    result.seconds = round(time.monotonic() - began, 1)
    if why:
        result.outcome, result.why = "cut", why
    result.save(file)
    return result


def end_all(group: int) -> None:
    """End what is left of a part: by request, after a while by force."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
    until = time.monotonic() + _GRACE
    while left := children():
        if time.monotonic() > until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def children() -> list[int]:
    """Return the processes whose parent is this one."""
    return [int(pid) for thread in Path("/proc/self/task").glob("*/children") for pid in thread.read_text().split()]


def run_part(options: argparse.Namespace) -> int:
    """Run a part in this process; return the exit status."""
    file = options.out / f"{options.part}.json"
    result = PartResult.load(file)
    from gpu_parts.part import Part  # needs more than the standard library

    kit = Kit(options.kit) if options.kit is not None else None
    part = Part(result, file, Path(tempfile.mkdtemp()), kit)
    with part.attempt(PARTS[options.part].title):
        importlib.import_module(f"gpu_parts.{options.part}").run(part)
    if result.errors:
        result.outcome, result.why = "failed", f"{len(result.errors)} errors"
    elif result.figures or not result.skipped:
        result.outcome = "ok"
    else:
        result.outcome, result.why = "skipped", result.skipped[0].why
    result.save(file)
    return 0


def summary(results: list[PartResult]) -> str:
    """Return what came of it: the figures of which something is wanted, gaps, and the time of each part."""
    lines = []
    for result in results:
        lines += [f"{result.part}: {figure}" for figure in result.figures if figure.wanted is not None]
        lines += [f"{result.part}: {gap.what}: skipped: {gap.why[:_SHOWN]}" for gap in result.skipped]
        lines += [f"{result.part}: {gap.what}: FAILED: {gap.why[:_SHOWN]}" for gap in result.errors]
    lines.append("")
    for result in results:
        wanted = [figure.met for figure in result.figures if figure.met is not None]
        lines.append(
            f"{result.part:8} {result.outcome:8} {result.seconds:4.0f} s of {result.limit:3.0f}, "
            f"{len(result.figures)} figures, {sum(wanted)} of {len(wanted)} as wanted"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
