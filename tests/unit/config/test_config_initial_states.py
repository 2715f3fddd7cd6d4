"""What a state holds before the first request of a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nerite.config.loading import LoadedModel, load_model_directory
from nerite.config.model_config import ModelSequenceBatching
from nerite.config.signature import initial_dims, read_initial_state
from nerite.core.errors import Internal, InvalidArgument, NeriteError


def state(
    *initial: dict[str, Any], dims: tuple[int, ...] = (2,), data_type: Any = "TYPE_INT32"
) -> ModelSequenceBatching.State:
    return ModelSequenceBatching.State(
        input_name="SI",
        output_name="SO",
        data_type=data_type,
        dims=dims,
        initial_state=tuple(
            ModelSequenceBatching.InitialState(**{"name": "a", "data_type": data_type, "dims": dims, **each})
            for each in initial
        ),
    )


def file(folder: Path, content: bytes) -> dict[str, str]:
    (folder / "initial_state").mkdir()
    (folder / "initial_state" / "data").write_bytes(content)
    return {"data_file": "data"}


@pytest.mark.parametrize(
    ("of", "dims", "size"),
    [
        (state(), (2,), 8),
        (state(dims=(-1, 3)), (1, 3), 12),
        (state({"zero_data": True, "dims": (5, 3)}, dims=(-1, 3)), (5, 3), 60),
        (state({"zero_data": True, "dims": (0, 3)}, dims=(-1, 3)), (0, 3), 0),
        (state(data_type="TYPE_STRING"), (2,), 8),
        (state(data_type="TYPE_FP16", dims=()), (), 2),
    ],
)
def test_zeros(of: ModelSequenceBatching.State, dims: tuple[int, ...], size: int, tmp_path: Path) -> None:
    assert initial_dims(of) == dims
    assert read_initial_state(of, tmp_path) == bytes(size)


def test_a_file(tmp_path: Path) -> None:
    assert read_initial_state(state(file(tmp_path, b"abcdefghij")), tmp_path) == b"abcdefgh"


def test_strings(tmp_path: Path) -> None:
    strings = b"\1\0\0\0a\0\0\0\0"
    assert read_initial_state(state(file(tmp_path, strings), data_type="TYPE_STRING"), tmp_path) == strings


@pytest.mark.parametrize(
    ("content", "found"), [(b"\1\0\0\0a", 1), (b"ab", 0), (b"\1\0\0\0a\2\0\0\0b", 1), (bytes(8) + b"\0", 2)]
)
def test_strings_that_are_not_those(tmp_path: Path, content: bytes, found: int) -> None:
    with pytest.raises(InvalidArgument, match=f"^expected 2 strings for inference input 'SI', got {found}$"):
        read_initial_state(state(file(tmp_path, content), data_type="TYPE_STRING"), tmp_path)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (
            "data",
            InvalidArgument,
            "initial_state setting expects 8 bytes, but the data provided from dataonly has 2 bytes",
        ),
        ("none", Internal, "failed to open text file for read .*/initial_state/none: No such file or directory"),
        (
            "../config.pbtxt",
            InvalidArgument,
            r"initial_state data file '../config.pbtxt' of state input 'SI' must stay",
        ),
        (
            "/etc/hostname",
            InvalidArgument,
            "initial_state data file '/etc/hostname' of state input 'SI' must stay within",
        ),
    ],
)
def test_files_that_do_not_serve(tmp_path: Path, name: str, error: type[NeriteError], text: str) -> None:
    file(tmp_path, b"ab")
    with pytest.raises(error, match=text):
        read_initial_state(state({"data_file": name}), tmp_path)


@pytest.mark.parametrize(
    ("dims", "initial", "text"),
    [
        ("1", "2", "'initial_state' field for state input 'SI' has other dimensions than the state."),
        (
            "-2",
            "1",
            "sequence batching state 'SI' dimension must be integer >= 0, or -1 to indicate a variable-size dimension "
            "for m",
        ),
    ],
)
def test_shapes_that_triton_dies_of(dims: str, initial: str, text: str, tmp_path: Path) -> None:
    told = model(tmp_path, f"dims: {dims}", f"dims: {initial} zero_data: true").mistakes
    assert text in [mistake.message for mistake in told]


def model(folder: Path, state_fields: str, initial: str) -> LoadedModel:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.py").touch()
    (folder / "m" / "config.pbtxt").write_text(
        'backend: "python"\n'
        'input { name: "IN" data_type: TYPE_INT32 dims: 1 }\n'
        'output { name: "OUT" data_type: TYPE_INT32 dims: 1 }\n'
        "sequence_batching { state {\n"
        f'  input_name: "SI" output_name: "SO" data_type: TYPE_INT32 {state_fields}\n'
        f'  initial_state {{ name: "a" data_type: TYPE_INT32 {initial} }}\n'
        "} }\n"
    )
    return load_model_directory(folder / "m")


def test_the_mistake_has_a_place(tmp_path: Path) -> None:
    (mistake,) = model(tmp_path, "dims: 1", 'dims: 1 data_file: "none"').mistakes
    assert mistake.line == 6
    assert mistake.remedy == (f"Write the name of a file in {tmp_path}/m/initial_state that holds the data of one row.")
    assert mistake.error is Internal


def test_a_state_that_grows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(
        'backend: "python" sequence_batching { state { input_name: "SI" output_name: "SO" data_type: TYPE_FP32 '
        "dims: -1 use_growable_memory: true } }"
    )
    (mistake,) = load_model_directory(tmp_path / "m").mistakes
    assert mistake.message == ("sequence batching state 'SI' uses 'use_growable_memory', which is not supported for m")
