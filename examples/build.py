"""Builds the example models: ``examples/sources`` plus a trained classifier makes ``examples/models``.

    python examples/build.py

Takes a few seconds the first time. After that it does only what is needed, and says so. Serve the result with
``nerite serve examples/models`` and try it with the programs in ``examples/clients``.
"""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "sources"
MODELS = HERE / "models"

GOOD_ENOUGH = 0.95
"""The accuracy below which something is wrong with the training."""


def build(models: Path = MODELS) -> list[str]:
    """Bring ``models`` up to date and return what was done, one line each.

    Raises ``RuntimeError`` if the classifier did not learn.
    """
    done = [f"copied {path.relative_to(models)}" for path in copy_sources(models)]
    accuracy = train_digits(models / "digits" / "1" / "model.onnx")
    if accuracy is not None:
        done.append(f"trained digits/1/model.onnx: {accuracy:.1%} of the digits it had not seen are right")
    return done


def copy_sources(models: Path) -> list[Path]:
    """Copy every source file whose copy is missing or different; return the copies made."""
    copied = []
    for source in sorted(SOURCES.rglob("*")):
        target = models / source.relative_to(SOURCES)
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        content = source.read_bytes()
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(f"{target.name}.unfinished")
            unfinished.write_bytes(content)
            # A server that watches the directory must never see half a file.
            os.replace(unfinished, target)
            copied.append(target)
    return copied


def train_digits(target: Path) -> float | None:
    """Train the classifier unless ``target`` is newer than the program that makes it; return its accuracy."""
    program = HERE / "train_digits.py"
    if target.is_file() and target.stat().st_mtime_ns >= program.stat().st_mtime_ns:
        return None
    # Here and not above: it takes longer than all the rest together.
    from train_digits import train

    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.unfinished")
    accuracy = train(unfinished)
    if accuracy < GOOD_ENOUGH:
        unfinished.unlink()
        raise RuntimeError(f"only {accuracy:.1%} of the digits are right, there should be {GOOD_ENOUGH:.0%}")
    os.replace(unfinished, target)
    return accuracy


def main() -> None:
    """Build, and say what was done."""
    for line in build() or ["up to date"]:
        print(f"{MODELS.relative_to(HERE.parent)}: {line}")


if __name__ == "__main__":
    main()
