"""Transcripts through the server, beside the engine's own pipeline and faster-whisper's own loop, of one checkpoint.

The words of the server must be those of the engine. The checkpoint has random weights, so that they mean nothing, and
the texts of faster-whisper, whose arithmetic differs, are others: their lengths are in the table. faster-whisper gets
an environment of its own (100 MB), which converts the checkpoint; without a package index it is left out.

    python benchmarks/transcription.py [--size tiny|base|small] [--rounds N] [--recordings SECONDS ...] [--print]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import speech_checkpoint
from contestants import nerite
from page import machine, publish
from speech_checkpoint import SIZES

from nerite.backends.interface import ModelContext
from nerite.llm import installation

_LOOPS: Final = Path(__file__).with_name("speech_loops.py")
_FASTER: Final = Path.home() / ".cache" / "nerite-faster-whisper"
_PACKAGES: Final = ("faster-whisper==1.2.1", "ctranslate2==4.8.5")
_CONFIG: Final = """
backend: "llm"
parameters { key: "WEIGHT_FORMAT" value { string_value: "fp32" } }
"""
_MODEL: Final = "listens"
_EDGE: Final = "a-boundary-that-no-recording-has"


class Heard(NamedTuple):
    """A transcript, and the seconds that it took."""

    text: str
    first: float
    seconds: float


def served(port: int, file: bytes, *, stream: bool) -> Heard:
    """Ask the server for a transcript."""
    fields = {"model": _MODEL, "language": "en", **({"stream": "true"} if stream else {})}
    parts = [
        f'--{_EDGE}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    head = f'--{_EDGE}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'.encode()
    body = b"".join([*parts, head, file, f"\r\n--{_EDGE}--\r\n".encode()])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began = time.perf_counter()
    connection.request(
        "POST", "/v1/audio/transcriptions", body, {"Content-Type": f"multipart/form-data; boundary={_EDGE}"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    if not stream:
        text = json.loads(answer.read())["text"]
        seconds = time.perf_counter() - began
        connection.close()
        return Heard(text, seconds, seconds)
    first, text = 0.0, ""
    for line in answer:
        if line.startswith(b"data: "):
            first = first or time.perf_counter() - began
            event = json.loads(line[6:])
            text = event.get("text", text)
    connection.close()
    return Heard(text, first, time.perf_counter() - began)


def looped(python: Path, kind: str, directory: Path, rounds: int, files: list[Path]) -> dict[str, list[Heard]]:
    """Run a loop around an engine; return what it heard by file."""
    command = [python, _LOOPS, kind, directory, str(rounds), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, list[Heard]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            found.setdefault(said.pop("file"), []).append(Heard(**said))
    return found


def faster_whisper(checkpoint: Path, folder: Path) -> tuple[Path, Path] | None:
    """Return a Python with faster-whisper and the checkpoint in its format; None if it cannot be installed."""
    python = _FASTER / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", _FASTER], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *_PACKAGES], check=True)
            # The converter needs torch and transformers, which are here.
            (site,) = (_FASTER / "lib").glob("python*/site-packages")
            here = next(path for path in sys.path if path.endswith("site-packages"))
            (site / "beside.pth").write_text(here)
        target = folder / "ctranslate2"
        program = "from ctranslate2.converters import TransformersConverter as C; import sys; C(*sys.argv[1:2], "
        program += "copy_files=['tokenizer.json', 'preprocessor_config.json']).convert(sys.argv[2])"
        subprocess.run(
            [python, "-c", program, checkpoint, target], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"without faster-whisper: {error}", file=sys.stderr)
        return None
    return python, target


def measured(folder: Path, given: argparse.Namespace) -> str:
    """Measure, and return the table."""
    model = folder / "models" / _MODEL
    speech_checkpoint.write(given.size, model / "1")
    (model / "config.pbtxt").write_text(_CONFIG)
    parameters = {"WEIGHT_FORMAT": {"string_value": "fp32"}}
    converted = installation.converted(ModelContext(_MODEL, 1, model, {"backend": "llm", "parameters": parameters}))
    files = []
    for seconds in given.recordings:
        files.append(folder / f"{seconds}.wav")
        files[-1].write_bytes(speech_checkpoint.wav(speech_checkpoint.recording(seconds, seconds)))
    rows: dict[str, dict[str, list[Heard]]] = {}
    rows["engine's own pipeline"] = looped(Path(sys.executable), "openvino", converted, given.rounds, files)
    with nerite("Nerite", folder / "models", folder) as server:
        served(server.http, files[0].read_bytes(), stream=False)
        for name, stream in (("Nerite", False), ("Nerite, streamed", True)):
            rows[name] = {
                file.name: [served(server.http, file.read_bytes(), stream=stream) for _ in range(given.rounds)]
                for file in files
            }
    other = faster_whisper(model / "1", folder)
    if other is not None:
        rows["faster-whisper's own loop"] = looped(other[0], "faster", other[1], given.rounds, files)
    lines = [
        "| recording, s | | to the first text, s | in all, s | real-time factor | characters | words as the engine's |",
        "|---|---|---|---|---|---|---|",
    ]
    for seconds in given.recordings:
        name = f"{seconds}.wav"
        own = rows["engine's own pipeline"][name][0].text
        lines += [row(seconds, contestant, heard[name], own) for contestant, heard in rows.items()]
    return "\n".join(lines) + "\n"


def row(seconds: int, contestant: str, heard: list[Heard], own: str) -> str:
    """Return a line of the table."""
    whole, first = (statistics.median(getattr(each, part) for each in heard) for part in ("seconds", "first"))
    equal = all(each.text.strip() == own.strip() for each in heard)
    said, length = "yes" if equal else "no", len(heard[0].text.strip())
    return f"| {seconds} | {contestant} | {first:.2f} | {whole:.2f} | {whole / seconds:.3f} | {length} | {said} |"


def main() -> None:
    """Measure, and write the page."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--size", choices=SIZES, default="base", help="of the model (base)")
    flags.add_argument("--rounds", type=int, default=3, help="transcripts of each recording (3); the median counts")
    flags.add_argument("--recordings", nargs="+", type=int, default=[10, 60], metavar="SECONDS")
    flags.add_argument("--print", action="store_true", help="print the table instead of writing the page")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        table = measured(Path(directory), given)
    text = f"Measured on {machine()}; a Whisper of the size {given.size} in 32 bits, {given.rounds} rounds.\n\n{table}"
    publish("transcription", text, given)


if __name__ == "__main__":
    main()
