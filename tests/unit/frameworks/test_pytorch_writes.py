"""What exported programs write into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_models import context, export

from nerite.frameworks.pytorch import artifact, exported
from nerite.frameworks.pytorch.program import Program


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, 4))
        self.layer = nn.Linear(4, 4)


class Nothing(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.kept


class Relu(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(torch.exp(x) * 2)


class Input(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)[:2].mul_(2)


class ThroughDropout(Base):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, training=False).relu_()


class OnePart(Base):
    def forward(self, x: Tensor) -> Tensor:
        first, _ = x.chunk(2)
        return first.add_(1)


class Buffer(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept += x
        return self.kept * 2


class Row(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[0].copy_(x[0])
        return x + 1


CASES: list[Any] = [
    (Nothing, False, False),
    (Relu, False, False),
    (Input, True, False),
    (OnePart, True, False),
    (Buffer, False, True),
    (Row, False, True),
]


@pytest.mark.parametrize(("module", "inputs", "state"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
@pytest.mark.parametrize("decomposed", [False, True])
def test_writes(tmp_path: Path, module: type[Base], inputs: bool, state: bool, decomposed: bool) -> None:
    export(tmp_path, module(), (torch.zeros(2, 4),), decomposed=decomposed)
    program: Program = exported.open_exported("m", artifact.make_plan(context(tmp_path)), "cpu")
    assert (program.writes_inputs, program.keeps_state) == (inputs, state)


def test_an_operation_that_may_give_back_what_it_got(tmp_path: Path) -> None:
    export(tmp_path, ThroughDropout(), (torch.zeros(2, 4),))
    assert exported.open_exported("m", artifact.make_plan(context(tmp_path)), "cpu").writes_inputs
