"""Writes the model directory of a function: its configuration, and a ``model.py`` that finds it.

``python -m nerite.functions.model_directory SOURCE REPOSITORY`` does it in a process of its own, so that the program
that defines the function is not imported into a server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nerite.config.json_form import read_json
from nerite.config.text import to_text
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.functions.annotations import FunctionMistake
from nerite.functions.function_source import FunctionSource, files_beside
from nerite.functions.model_function import ModelFunction
from nerite.functions.program_import import functions_of, import_program, located

_MODEL: Final = '''"""Model '{name}': the function {source}, found by Nerite."""

from nerite.functions.registered import {function}

TritonPythonModel = {function}({arguments})
'''
_CONFIG: Final = "config.pbtxt"


def write_registered(repository: Path, name: str, key: str, config: Mapping[str, Any]) -> None:
    """Write the directory of a model whose class this process has registered under a key. Raises ``NeriteError``."""
    config = {**config, "parameters": {"EXECUTION_MODE": {"string_value": "thread"}, **config.get("parameters", {})}}
    _write(repository, name, config, _MODEL.format(name=name, source=key, function="registered", arguments=repr(key)))


def write_imported(repository: Path, source: FunctionSource, function: ModelFunction[..., Any], *, copy: bool) -> None:
    """Write the directory of a function that workers import. ``copy``: with its file. Raises ``NeriteError``."""
    name = function.name
    if source.is_file and copy:
        version = repository / name / "1"
        for path in files_beside(source.path):
            target = version / path.relative_to(source.path.parent)
            if target.name == "model.py" and target.parent == version:
                raise InvalidArgument(f"{path} would replace the model.py of the model directory: rename it")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        place = f"__file__, {source.path.name!r}, {source.name!r}"
        text = _MODEL.format(name=name, source=source.name, function="beside", arguments=place)
    else:
        place = str(source.path) if source.is_file else source.place
        arguments = f"{place!r}, {source.name!r}"
        text = _MODEL.format(name=name, source=source, function="imported", arguments=arguments)
    _write(repository, name, function.config(), text)


def _write(repository: Path, name: str, config: Mapping[str, Any], model: str) -> None:
    parsed = read_json(config, name)
    if parsed.mistakes:
        raise InvalidArgument(f"config of {name}(): {parsed.mistakes[0].message}")
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    _replace(repository / name / _CONFIG, to_text(parsed.config))
    _replace(version / "model.py", model)


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def write_in_subprocess(source: FunctionSource, repository: Path, *, copy: bool = False) -> list[str]:
    """Write the directories of the functions of a source in another process; return their names.

    Raises ``InvalidArgument`` with what is wrong with the program.
    """
    command = [
        sys.executable,
        "-m",
        "nerite.functions.model_directory",
        str(source),
        str(repository),
        *(["--copy"] * copy),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidArgument(done.stderr.strip() or f"{source} cannot be imported: status {done.returncode}")
    return [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]


_MARK: Final = "nerite-model: "


def main(arguments: Sequence[str]) -> int:
    """Write the directories, and print the names of the models, a line each; return the exit status."""
    text, repository, *copy = arguments
    source = FunctionSource.parse(text)
    assert source is not None
    try:
        module = import_program(source)
        for variable, function in functions_of(source, module):
            found = located(source, module)._replace(name=variable)
            write_imported(Path(repository), found, function, copy=bool(copy))
            print(f"{_MARK}{function.name}")
    except (NeriteError, FunctionMistake) as error:
        print(_text_of(error), file=sys.stderr)
        return 1
    except Exception as error:  # the program's own
        print(f"{source} cannot be imported: {_text_of(error)}", file=sys.stderr)
        return 1
    return 0


def _text_of(error: Exception) -> str:
    """Return an error with the last line of the program that led to it."""
    text = str(error) if isinstance(error, NeriteError | FunctionMistake) else f"{type(error).__name__}: {error}"
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if f"{os.sep}nerite{os.sep}" not in each.filename
    ]
    frames = [each for each in frames if not each.filename.startswith("<")]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {text}" if frames else text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
