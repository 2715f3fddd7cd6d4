"""The models that are analyzed: those that are asked, and those whose settings are varied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nerite.analyze.settings import Value, changed
from nerite.config.loading import CONFIG_FILE, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.text_edit import edited
from nerite.config.text_form import to_text


@dataclass(frozen=True, slots=True)
class Subject:
    """A model whose settings are varied."""

    path: Path
    """Of its config.pbtxt, which need not be there."""
    text: str
    """What stands there."""
    written: ModelConfig
    """What that says."""
    complete: ModelConfig
    """What is made of it."""

    @classmethod
    def read(cls, directory: Path, complete: ModelConfig) -> Subject:
        """Return the model in a directory, which has loaded as ``complete``."""
        path = directory / CONFIG_FILE
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        written = dataclasses.replace(poll_model_directory(directory).text.config, name=complete.name)
        return cls(path, text, written, complete)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.complete.name

    def config(self, values: Mapping[str, Value]) -> ModelConfig:
        """Return its configuration as it is written, with settings changed."""
        return changed(self.written, self.complete.backend, values)

    def rewritten(self, values: Mapping[str, Value]) -> str:
        """Return the text of its config.pbtxt with settings changed, and all else as it stands there."""
        return edited(self.text, self.written, self.config(values))


@dataclass(frozen=True)
class Subjects:
    """Models whose settings are varied together."""

    all: tuple[Subject, ...]
    prefixed: bool = False
    """Settings are known as MODEL.SETTING."""

    def key(self, subject: Subject, setting: str) -> str:
        """Return how a setting of a model is called."""
        return f"{subject.name}.{setting}" if self.prefixed else setting

    def values(self, changes: Mapping[str, Value]) -> Iterator[tuple[Subject, dict[str, Value]]]:
        """Yield for each model what is changed of it."""
        parts = [(*key.rpartition(".")[::2], value) for key, value in changes.items()]
        for subject in self.all:
            yield subject, {setting: value for model, setting, value in parts if model in ("", subject.name)}

    def identity(self, changes: Mapping[str, Value]) -> str:
        """Return what tells configurations apart, whatever the present one is and however their texts are laid out."""
        return "".join(to_text(subject.config(values)) for subject, values in self.values(changes))

    def texts(self, changes: Mapping[str, Value]) -> dict[str, str]:
        """Return the config.pbtxt of each model."""
        return {subject.name: subject.rewritten(values) for subject, values in self.values(changes)}
