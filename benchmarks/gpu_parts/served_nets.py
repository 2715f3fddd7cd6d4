"""The nets that are served and run bare: ResNet-50 and BERT-base in bf16, and small ones for rehearsals.

    python -m gpu_parts.served_nets FOLDER KIND NET ...

writes ``FOLDER/NET.pt2``, a program of ``torch.export``. The weights are random: they take as long as others.
Importing this imports no framework.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST = 128
"""Rows of a batch."""
_WORDS = 1000
"""Ids of words are below this."""
_DTYPES: Mapping[str, Any] = {"UINT8": np.uint8, "FP32": np.float32, "INT64": np.int64}


class Net(NamedTuple):
    """A net, and the tensors of one row."""

    title: str
    rows: str
    """What a row is."""
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    """Datatype and shape of each, by name."""
    output: str
    columns: int


def nets(gpu: bool) -> dict[str, Net]:
    """Return the nets by name; small ones, unless for a GPU."""
    side, classes, words = (224, 1000, 128) if gpu else (32, 10, 16)
    pictures = "ResNet-50" if gpu else "a small convolutional net"
    text = "BERT-base" if gpu else "a small BERT"
    shape = (3, side, side)
    ids = dict.fromkeys(("input_ids", "attention_mask"), ("INT64", (words,)))
    return {
        "uint8": Net(f"{pictures}, UINT8", "images", {"images": ("UINT8", shape)}, "classes", classes),
        "text": Net(f"{text}, {words} tokens", "sequences", ids, "logits", 2),
        "fp32": Net(f"{pictures}, FP32", "images", {"images": ("FP32", shape)}, "classes", classes),
    }


def batch(net: Net, rows: int) -> dict[str, NDArray[Any]]:
    """Return the inputs of a batch, the same ones each time."""
    random = np.random.default_rng(1)
    made = {}
    for name, (datatype, dims) in net.inputs.items():
        most = {"UINT8": 256, "FP32": 2, "INT64": _WORDS}[datatype]
        values = np.ones((rows, *dims)) if name == "attention_mask" else random.random((rows, *dims)) * most
        made[name] = values.astype(_DTYPES[datatype])
    return made


def module(name: str, gpu: bool) -> Any:
    """Return a module of PyTorch, in bf16."""
    import torch

    torch.manual_seed(0)
    if name == "text":
        from transformers import BertConfig, BertForSequenceClassification

        small: dict[str, Any] = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
        }
        config = BertConfig(**({} if gpu else small | {"vocab_size": _WORDS}))
        bert = BertForSequenceClassification(config)

        class Text(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bert = bert

            def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"logits": self.bert(input_ids=input_ids, attention_mask=attention_mask).logits.float()}

        return Text().bfloat16().eval()

    class Pictures(torch.nn.Module):
        """Takes pixels from 0 to 255 as UINT8, or whatever the net takes as FP32."""

        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            x = images.bfloat16()
            if images.dtype is torch.uint8:
                x = x / 127.5 - 1.0
            return {"classes": self.net(x.contiguous(memory_format=torch.channels_last)).float()}

    if gpu:
        from torchvision.models import resnet50

        net = resnet50(weights=None)
    else:
        layers = torch.nn
        convolution = layers.Conv2d(3, 16, 3, stride=2)
        net = layers.Sequential(
            convolution, layers.ReLU(), layers.AdaptiveAvgPool2d(1), layers.Flatten(), layers.Linear(16, 10)
        )
    return Pictures(net).bfloat16().to(memory_format=torch.channels_last).eval()


def main(folder: Path, kind: str, names: list[str]) -> None:
    """Write programs."""
    import torch

    from gpu_parts.answer_models import exported

    warnings.simplefilter("ignore")
    gpu = kind == "KIND_GPU"
    for name in names:
        example = tuple(torch.from_numpy(values) for values in batch(nets(gpu)[name], 2).values())
        torch.export.save(exported(module(name, gpu), example, MOST), folder / f"{name}.pt2")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
