"""The configuration that ``auto_complete_config`` is given, fills in and returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class ModelConfig:
    """A model's configuration, and the few changes that a model may make to it.

    A change that contradicts what config.pbtxt says raises ``ValueError``, in Triton's words.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration. Only what a model may change is read back from it."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch; it may be raised, not lowered."""
        specified = self._model_config.get("max_batch_size", 0)
        if specified > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {specified}, but in auto-complete-config function for "
                f"model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Choose the dynamic batcher, with defaults if it is not configured."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Declare an input: ``name``, ``data_type``, ``dims``, and ``optional`` if wanted."""
        self._add("input", input, ("optional",), "'name', 'data_type', 'dims' and 'optional'")

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Declare an output: ``name``, ``data_type``, ``dims``."""
        self._add("output", output, (), "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, bool]) -> None:
        """Say whether the model is decoupled."""
        if not transaction_policy_dict.keys() <= {"decoupled"}:
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                "property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        for key, value in transaction_policy_dict.items():
            if policy.get(key, value) != value:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                    f"already set to '{policy[key]}'."
                )
            policy[key] = value

    @property
    def _name(self) -> str:
        return str(self._model_config.get("name", ""))

    def _add(self, kind: str, tensor: Mapping[str, Any], more: tuple[str, ...], allowed: str) -> None:
        place = f"in auto-complete-config function for model '{self._name}'"
        if "name" not in tensor:
            raise ValueError(f"{kind} {place} is missing 'name' property.")
        name = tensor["name"]
        if not tensor.keys() <= {"name", "data_type", "dims", *more}:
            raise ValueError(f"{kind} '{name}' {place} contains property other than {allowed}.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{name}' {place} is missing '{key}' property.")
        tensors = self._model_config.setdefault(kind, [])
        for declared in tensors:
            if declared["name"] == name:
                self._agree(kind, declared, tensor)
                declared.update(tensor)
                return
        tensors.append(dict(tensor))

    def _agree(self, kind: str, declared: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        name = given["name"]
        data_type = declared.get("data_type", "TYPE_INVALID")
        if data_type not in ("TYPE_INVALID", given["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {data_type} for {kind} "
                f"'{name}', model provides {given['data_type']}"
            )
        for key in ("dims", "optional"):
            here, there = declared.get(key), given.get(key)
            specified = bool(here) if key == "dims" else here is not None and there is not None
            if specified and here != there:
                raise ValueError(
                    f"model '{self._name}', tensor '{name}': the model expects {key} {there} but the model "
                    f"configuration specifies {key} {here}"
                )
