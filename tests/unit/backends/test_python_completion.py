"""``auto_complete_config``: what it may change, and Triton's texts for what it may not."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from nerite.backends.python import PythonBackend
from nerite.core.errors import Internal
from python_model_files import model_on_disk

BARE: dict[str, Any] = {"input": [], "output": []}
FULL: dict[str, Any] = {
    "max_batch_size": 4,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [16], "optional": False}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [16]}],
}


def completing(folder: Path, config: dict[str, Any], *lines: str, decorator: str = "@staticmethod") -> Any:
    """Complete ``config`` with a model whose ``auto_complete_config`` consists of ``lines``; the first is line 7."""
    source = (
        f"import triton_python_backend_utils as pb_utils\n\n\nclass TritonPythonModel:\n    {decorator}\n"
        "    def auto_complete_config(config):\n" + indent("\n".join(lines), "        ") + "\n"
    )
    return PythonBackend().complete(model_on_disk(folder, source, **config))


def tensor(kind: str, **properties: object) -> str:
    return f"config.add_{kind}({properties!r})"


X4 = {"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}
Y4 = {"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]}
PLACE = "in auto-complete-config function for model 'm'"

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an error": (BARE, "raise ValueError('boo')", "ValueError: boo"),
    "a smaller batch": (
        FULL,
        "config.set_max_batch_size(2)",
        "ValueError: configuration specified max_batch_size 4, but in auto-complete-config function for model 'm' "
        "specified max_batch_size 2",
    ),
    "a negative batch": (
        BARE,
        "config.set_max_batch_size(-1)",
        "ValueError: configuration specified max_batch_size 0, but in auto-complete-config function for model 'm' "
        "specified max_batch_size -1",
    ),
    "another scheduler": (
        FULL | {"sequence_batching": {}},
        "config.set_dynamic_batching()",
        "ValueError: Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config "
        "function for model 'm' tries to set scheduling_choice as 'dynamic_batching'",
    ),
    "another type of an input": (
        FULL,
        tensor("input", name="INPUT0", data_type="TYPE_INT32", dims=[16]),
        "ValueError: unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'INPUT0', model "
        "provides TYPE_INT32",
    ),
    "another type of an output": (
        FULL,
        tensor("output", name="OUTPUT0", data_type="TYPE_INT32", dims=[16]),
        "ValueError: unable to load model 'm', configuration expects datatype TYPE_FP32 for output 'OUTPUT0', model "
        "provides TYPE_INT32",
    ),
    "other dims of an input": (
        FULL,
        tensor("input", **X4),
        "ValueError: model 'm', tensor 'INPUT0': the model expects dims [4] but the model configuration specifies "
        "dims [16]",
    ),
    "other dims of an output": (
        FULL,
        tensor("output", **Y4),
        "ValueError: model 'm', tensor 'OUTPUT0': the model expects dims [4] but the model configuration specifies "
        "dims [16]",
    ),
    "an input that is optional after all": (
        FULL,
        tensor("input", name="INPUT0", data_type="TYPE_FP32", dims=[16], optional=True),
        "ValueError: model 'm', tensor 'INPUT0': the model expects optional True but the model configuration "
        "specifies optional False",
    ),
    "an optional output": (
        BARE,
        tensor("output", **Y4, optional=True),
        f"ValueError: output 'OUTPUT0' {PLACE} contains property other than 'name', 'data_type' and 'dims'.",
    ),
    "a reshape": (
        BARE,
        tensor("input", **X4, reshape={}),
        f"ValueError: input 'INPUT0' {PLACE} contains property other than 'name', 'data_type', 'dims' and 'optional'.",
    ),
    "no name": (
        BARE,
        tensor("input", data_type="TYPE_FP32", dims=[16]),
        f"ValueError: input {PLACE} is missing 'name' property.",
    ),
    "no type": (
        BARE,
        tensor("input", name="I", dims=[16]),
        f"ValueError: input 'I' {PLACE} is missing 'data_type' property.",
    ),
    "no dims": (
        BARE,
        tensor("output", name="O", data_type="TYPE_FP32"),
        f"ValueError: output 'O' {PLACE} is missing 'dims' property.",
    ),
    "another transaction policy": (
        FULL | {"model_transaction_policy": {"decoupled": False}},
        "config.set_model_transaction_policy({'decoupled': True})",
        "ValueError: trying to change decoupled property in auto-complete-config for model 'm', which is already set "
        "to 'False'.",
    ),
    "an unknown transaction policy": (
        FULL,
        "config.set_model_transaction_policy({'x': True})",
        "ValueError: model transaction property in auto-complete-config function for model 'm' contains property "
        "other than 'decoupled'.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    config, line, text = REFUSED[name]
    with pytest.raises(Internal) as refused:
        completing(tmp_path, config, line)
    assert refused.value.message == f"{text}\n\nAt:\n  {tmp_path}/m/1/model.py(7): auto_complete_config\n"


@pytest.mark.parametrize("returned", ["pass", "return {}", "return config.as_dict()"])
def test_not_a_configuration(returned: str, tmp_path: Path) -> None:
    with pytest.raises(Internal) as refused:
        completing(tmp_path, BARE, returned)
    assert refused.value.message == (
        "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."
    )


def test_a_class_method_is_called_like_a_static_one(tmp_path: Path) -> None:
    with pytest.raises(Internal) as refused:
        completing(tmp_path, BARE, "return config", decorator="@classmethod")
    assert refused.value.message == (
        "TypeError: TritonPythonModel.auto_complete_config() takes 1 positional argument but 2 were given"
    )


def test_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(Internal, match="TypeError: Object of type object is not JSON serializable"):
        completing(tmp_path, BARE, "config.as_dict()['input'] = object()", "return config")


def test_completes(tmp_path: Path) -> None:
    completed = completing(
        tmp_path,
        BARE,
        tensor("input", **X4, optional=True),
        tensor("output", **Y4),
        "config.set_max_batch_size(8)",
        "config.set_dynamic_batching()",
        "config.set_model_transaction_policy({'decoupled': False})",
        "return config",
    )
    assert completed == {
        "name": "m",
        "max_batch_size": 8,
        "input": [{**X4, "optional": True}],
        "output": [Y4],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": False},
    }


def test_fills_in_what_is_declared_in_part(tmp_path: Path) -> None:
    declared = {
        "input": [{"name": "INPUT0", "data_type": "TYPE_INVALID", "dims": [], "format": "FORMAT_NONE"}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_INVALID", "dims": [4]}],
    }
    completed = completing(tmp_path, declared, tensor("input", **X4), tensor("output", **Y4), "return config")
    assert completed["input"] == [{**X4, "format": "FORMAT_NONE"}]
    assert completed["output"] == [Y4]


@pytest.mark.parametrize("size", [4, 8])
def test_a_larger_batch(size: int, tmp_path: Path) -> None:
    completed = completing(tmp_path, FULL, f"config.set_max_batch_size({size})", "return config")
    assert completed["max_batch_size"] == size


def test_dynamic_batching_as_configured_stays(tmp_path: Path) -> None:
    configured = FULL | {"dynamic_batching": {"max_queue_delay_microseconds": 5}}
    completed = completing(
        tmp_path,
        configured,
        "config.set_dynamic_batching()",
        "config.as_dict()['dynamic_batching'] = {'max_queue_delay_microseconds': 7}",
        "return config",
    )
    assert completed["dynamic_batching"] == {"max_queue_delay_microseconds": 5}


def test_everything_else_stays(tmp_path: Path) -> None:
    completed = completing(
        tmp_path,
        FULL | {"parameters": {"a": {"string_value": "b"}}},
        "config.as_dict().update(name='other', parameters={}, instance_group=[])",
        "return config",
    )
    assert completed == {"name": "m", **FULL, "parameters": {"a": {"string_value": "b"}}}


def test_a_model_without_the_method_changes_nothing(tmp_path: Path) -> None:
    context = model_on_disk(tmp_path, "class TritonPythonModel:\n    pass\n", **FULL)
    assert PythonBackend().complete(context) == context.config


def test_a_configuration_of_the_models_own_making(tmp_path: Path) -> None:
    line = 'return pb_utils.ModelConfig(\'{"max_batch_size": 2, "input": [], "output": []}\')'
    assert completing(tmp_path, FULL, line) == {"name": "m", "max_batch_size": 2, "input": [], "output": []}
