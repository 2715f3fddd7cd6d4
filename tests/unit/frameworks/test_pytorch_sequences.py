"""PyTorch models of sequences: controls and states are inputs and outputs that callers know nothing of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_models import Opened, context, entry, export, script

from nerite.config.json_form import from_json
from nerite.core.errors import InvalidArgument
from nerite.dispatch.sequence_inputs import SequenceInputs
from nerite.frameworks.pytorch import PyTorchBackend
from nerite.scheduling.sequence import RequestSequence
from opened import decoded, request


class Accumulator(nn.Module):
    def forward(self, x: Tensor, start: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        total = x + before * (1 - start)
        return total, total.clone()


def config(control: str = "fp32_false_true", **names: str) -> dict[str, Any]:
    before, after, start = (names.get(name, name) for name in ("before", "after__1", "start"))
    state = {"input_name": before, "output_name": after, "data_type": "TYPE_FP32", "dims": [4]}
    return {
        "name": "m",
        "max_batch_size": 8,
        "input": [entry(names.get("x", "x"))],
        "output": [entry("total__0")],
        "sequence_batching": {
            "control_input": [{"name": start, "control": [{"kind": "CONTROL_SEQUENCE_START", control: [0, 1]}]}],
            "state": [state],
        },
    }


POSITIONS = {"x": "x__0", "start": "start__1", "before": "before__2"}


@pytest.mark.parametrize(("kind", "names"), [("torchscript", {}), ("torchscript", POSITIONS), ("exported", {})])
def test_sequences_side_by_side(tmp_path: Path, kind: str, names: dict[str, str]) -> None:
    if kind == "torchscript":
        script(tmp_path, Accumulator())
    else:
        batch = torch.export.Dim("batch")
        rows = (torch.zeros(2, 4), torch.zeros(2, 1), torch.zeros(2, 4))
        export(tmp_path, Accumulator(), rows, dynamic_shapes=({0: batch}, {0: batch}, {0: batch}))
    opened = Opened(tmp_path, config(**names))
    attach = SequenceInputs(from_json(opened.config), tmp_path)
    sequences = [RequestSequence(number) for number in (1, 2)]
    for step in range(3):
        batch_of = []
        for sequence, value in zip(sequences, (1.0, 10.0), strict=True):
            asked = request(**{names.get("x", "x"): np.full((1, 4), value, np.float32)})
            attach.attach(asked, sequence, start=step == 0, end=False)
            batch_of.append(asked)
        answers = [
            decoded(attach.settle(asked, response, sequence))
            for asked, response, sequence in zip(batch_of, opened.execute(*batch_of), sequences, strict=True)
        ]
        assert [answer["total__0"][0, 0] for answer in answers] == [step + 1, 10 * (step + 1)]
        assert all(answer.keys() == {"total__0"} for answer in answers)


def test_a_control_of_another_type(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    rows = (torch.zeros(2, 4), torch.zeros(2, 1), torch.zeros(2, 4))
    export(tmp_path, Accumulator(), rows, dynamic_shapes=({0: batch}, {0: batch}, {0: batch}))
    with pytest.raises(InvalidArgument) as refused:
        PyTorchBackend().open(context(tmp_path, config("int32_false_true")))
    assert refused.value.message == (
        "unable to load model 'm', configuration expects datatype TYPE_INT32 for sequence control 'start', model "
        "provides TYPE_FP32. Set data_type: TYPE_FP32"
    )
