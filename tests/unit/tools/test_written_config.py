"""The config.pbtxt that is written says what it means, and is read back as it was."""

from __future__ import annotations

from pathlib import Path

from nerite.config.loading import poll_model_directory
from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelInput, ModelInstanceGroup, ModelOutput
from nerite.config.text import parse_text
from nerite.tools.add.destination import written_config

CONFIG = ModelConfig(
    backend="onnxruntime",
    max_batch_size=8,
    input=(ModelInput(name="x", data_type="TYPE_FP32", dims=(3, -1)),),
    output=(ModelOutput(name="y", data_type="TYPE_FP32", dims=(2,)),),
    dynamic_batching=ModelDynamicBatching(preferred_batch_size=(4,)),
    instance_group=(ModelInstanceGroup(count=2),),
)


def test_it_is_read_back(tmp_path: Path) -> None:
    text = written_config(CONFIG, "A model.", {"max_batch_size": "Measured: 8 is best."})
    parsed = parse_text(text, "config.pbtxt")
    assert parsed.mistakes == ()
    assert parsed.config == CONFIG
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    assert poll_model_directory(tmp_path / "m").mistakes == ()


def test_each_part_is_explained() -> None:
    text = written_config(CONFIG, "A model.", {"max_batch_size": "Measured: 8 is best."})
    assert text.startswith("# A model.\n")
    paragraphs = text.split("\n\n")
    assert all(paragraph.startswith("# ") for paragraph in paragraphs)
    assert "# Measured: 8 is best.\nmax_batch_size: 8\n" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_no_batches_are_said_in_so_many_words() -> None:
    text = written_config(ModelConfig(backend="python", input=CONFIG.input), "A model.")
    assert "# No batching: the dims below are the complete shapes.\nmax_batch_size: 0\n" in text
    assert "max_batch_size" not in written_config(ModelConfig(backend="python"), "A model.")
