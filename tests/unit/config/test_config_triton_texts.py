"""What NVIDIA's Triton 2.51 said about 278 configurations, and what we say about them.

``triton_texts.json`` was recorded from Triton with the Python backend. For each model it has the configuration, the
files, the line of protobuf's parser (with that parser's own place, which is behind the wrong word) and the text that a
client is told. ``triton_configs.json`` holds answers of ``GET /v2/models/M/config``.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import nerite
from nerite.config.defaults import NO_GPUS, normalise, normalise_instances
from nerite.config.json_form import to_json
from nerite.config.loading import load_model_directory
from nerite.config.text import parse_text

HERE = Path(__file__).parent
CASES: list[dict[str, Any]] = json.loads((HERE / "triton_texts.json").read_text())
CONFIGS: list[dict[str, Any]] = json.loads((HERE / "triton_configs.json").read_text())

ENUM = 'Unknown enumeration value of "{0}" for field "{1}".'
DIFFERENT = {
    # Triton takes an enum number that has no name and stumbles over it later, or never.
    "kindbad": ENUM.format("17", "kind"),
    "kindneg": ENUM.format("-1", "kind"),
    "itype99": ENUM.format("99", "data_type"),
    "bin_kind9": ENUM.format("9", "kind"),
    # Triton's comparison lets a number through that is none.
    "fpnan": "sequence batching minimum slot utilization must be in range (0.0, 1.0] for fpnan",
    # Which of two unused tensors is told first is up to a hash table in Triton. We tell both.
    "e_noio": "ensemble tensor 'OUT' is unused in ensemble 'e_noio'",
    # Triton looks for a model file in .git because it is the first directory; we look in versions only.
    "p_hidden": None,
    # Newer than the release that was recorded.
    "label_out": "label file path '{repository}/label_out/../x.txt' for output 'B' in model 'label_out' is outside "
    "model directory",
    # Triton takes these, and gives the model what is in memory by chance, or one of two tensors with one name; without
    # an input_name it ends at the first request.
    "sq_state": "sequence batching state 'A' is an input of the model, too, for sq_state",
    "state_dup_in": "sequence batching state 'SI' is another state, too, for state_dup_in",
    "state_dup_out": "sequence batching state 'SO' is another state, too, for state_dup_out",
    "state_notype": "sequence batching state 'SI' must specify 'data_type' for state_notype",
    "state_noin": "sequence batching state must specify 'input_name' for state_noin",
    "state_noout": "sequence batching state must specify 'output_name' for state_noout",
    "state_control_is_input": "sequence batching control tensor 'IN' is an input of the model, too, for "
    "state_control_is_input",
    "state_control_is_state": "sequence batching state 'SI' is a control tensor, too, for state_control_is_state",
    "state_two_controls_one_tensor": "sequence batching control tensor 'C' is specified for multiple control kinds for "
    "state_two_controls_one_tensor",
    # Triton ignores it where there is no GPU.
    "state_grow_same": "sequence batching state 'SI' uses 'use_growable_memory', which is not supported for "
    "state_grow_same",
}
"""Where our first text is another one, and why. None: we find nothing wrong."""


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_first_mistake_is_told_in_tritons_words(case: dict[str, Any], tmp_path: Path) -> None:
    name = case["name"]
    directory = tmp_path / name
    for file in case.get("files", ["1/model.py"]):
        path = directory / file
        if file.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    directory.mkdir(exist_ok=True)
    if case["config"] is not None:
        (directory / "config.pbtxt").write_text(case["config"])
    loaded = load_model_directory(
        directory, auto_complete="strict" not in case, complete=lambda config, version: to_json(config)
    )
    told = loaded.mistakes[0].message if loaded.mistakes else None
    wanted = case["parser"].split(": ", 1)[1] if "parser" in case else case.get("error")
    wanted = DIFFERENT.get(name, wanted)
    assert told == (wanted and wanted.replace("{repository}", str(tmp_path)))
    if loaded.mistakes and name not in DIFFERENT:
        client_is_told = loaded.mistakes[0].as_error().message
        assert client_is_told == case["error"].replace("{repository}", str(tmp_path))


@pytest.mark.parametrize("auto_complete", [True, False])
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_every_mistake_has_a_place_and_a_remedy(case: dict[str, Any], auto_complete: bool, tmp_path: Path) -> None:
    directory = tmp_path / case["name"]
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").touch()
    if case["config"] is not None:
        (directory / "config.pbtxt").write_text(case["config"])
    lines = (case["config"] or "").splitlines()
    for mistake in load_model_directory(directory, auto_complete=auto_complete).mistakes:
        assert mistake.file == str(directory / "config.pbtxt")
        if case["config"] is not None:
            assert 1 <= mistake.line <= len(lines) + 1
            assert 1 <= mistake.column <= len([*lines, ""][mistake.line - 1]) + 1
        assert mistake.remedy


def test_every_mistake_in_the_code_is_made_with_a_remedy() -> None:
    made = [
        (f"{file}:{call.lineno}", {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords})
        for file in Path(nerite.__path__[0]).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Mistake"
    ]
    assert len(made) > 60
    assert [place for place, arguments in made if arguments.get("remedy", "''") == "''"] == []


@pytest.mark.parametrize("case", CONFIGS, ids=[case["name"] for case in CONFIGS])
def test_a_configuration_is_printed_as_triton_prints_it(case: dict[str, Any]) -> None:
    config = dataclasses.replace(parse_text(case["config"] or "").config, name=case["name"])
    if config.ensemble_scheduling is None:
        config = dataclasses.replace(config, backend="python", default_model_filename="model.py")
    ours = to_json(normalise_instances(normalise(config), NO_GPUS))
    # Fields that came after the release that was recorded.
    ours.get("ensemble_scheduling", {}).pop("max_inflight_requests", None)
    assert json.dumps(ours) == json.dumps(_numbers(case["json"]))


def _numbers(value: Any, name: str = "") -> Any:
    """Return the recorded JSON with the 64-bit numbers that Triton forgets to turn from strings into numbers."""
    if isinstance(value, dict):
        return {key: _numbers(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item, name) for item in value]
    return int(value) if name in ("dim", "dims", "device_id") and isinstance(value, str) else value
