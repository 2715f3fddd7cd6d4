"""Makes the weights of this pipeline: teaches ``vision`` and ``fusion`` together, on pictures from ``pictures.py``.

    python examples/pipelines/vision_language/train.py

Half a minute, and the same result each time. The other steps are used as they are served: what the server decodes,
finds and tokenizes is what the networks are taught on, so the two cannot differ.
"""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pictures import draw, questions
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nerite.testing import load_model

MODELS = Path(__file__).resolve().parent / "models"
PICTURES = 2000
EPOCHS = 7
BATCH = 16
GRID = 8
FEATURES = 32
WIDE = 96
WORDS = 24
ANSWERS = 15


class Vision(nn.Module):
    """A picture as a grid of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 4, stride=4), nn.BatchNorm2d(24), nn.ReLU(),
            nn.Conv2d(24, FEATURES, 3, stride=2, padding=1), nn.BatchNorm2d(FEATURES),
        )  # fmt: skip

    def forward(self, pixels: Tensor) -> Tensor:
        scaled = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        return self.layers(scaled).permute(0, 2, 3, 1).reshape(-1, GRID * GRID, FEATURES)


class Fusion(nn.Module):
    """Asks the question of each box, and puts together what the boxes say."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE, padding_idx=0)
        self.question = nn.Sequential(nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE))
        self.geometry = nn.Sequential(nn.Linear(5, FEATURES), nn.LayerNorm(FEATURES), nn.ReLU())
        self.region = nn.Sequential(nn.Linear(2 * FEATURES, WIDE), nn.LayerNorm(WIDE))
        self.verdict = nn.Sequential(nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU())
        self.answer = nn.Sequential(nn.Linear(2 * WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, ANSWERS))

    def forward(self, features: Tensor, boxes: Tensor, words: Tensor) -> Tensor:
        question = self.question(self.words(words).sum(1))
        shares = overlap(boxes)
        regions = self.region(torch.cat([shares @ features, self.geometry(boxes)], 2))
        # What is said of a box that is not there is left out of the sum: sums can count, and means cannot.
        verdicts = self.verdict(regions * question[:, None]) * (boxes[:, :, 2:3] > 0)
        return self.answer(torch.cat([verdicts.sum(1), question], 1))


def overlap(boxes: Tensor) -> Tensor:
    """Return how much each cell of the grid counts for each box, (pictures, boxes, cells). Zero for no box."""
    edges = torch.arange(GRID + 1) / GRID
    left, top, right, bottom, _ = boxes[..., None].unbind(2)
    across = (torch.minimum(right, edges[1:]) - torch.maximum(left, edges[:-1])).clamp(min=0)
    down = (torch.minimum(bottom, edges[1:]) - torch.maximum(top, edges[:-1])).clamp(min=0)
    shares = (down[..., :, None] * across[..., None, :]).flatten(2)
    return shares / shares.sum(2, keepdim=True).clamp(min=1e-6)


@dataclass
class Lessons:
    """Pictures as the steps before the networks see them, and questions about each."""

    pixels: Tensor
    boxes: Tensor
    asked: list[list[tuple[list[int], int]]]
    """For each picture, the words of its questions and the indices of their answers."""

    def batch(self, chosen: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return pixels and boxes of some pictures; for each question its picture among these, words and answer."""
        rows = [(row, words, answer) for row, index in enumerate(chosen) for words, answer in self.asked[index]]
        picture, words, answer = map(torch.tensor, zip(*rows, strict=True))
        return self.pixels[chosen], self.boxes[chosen], picture, words, answer


def prepare(count: int, chance: random.Random) -> Lessons:
    """Draw pictures, think of questions, and put both through the very steps that the server will put them through."""
    pictures = [draw(chance) for _ in range(count)]
    answers = (MODELS / "answer" / "1" / "answers.txt").read_text().split()
    pixels, boxes, asked = [], [], []
    with (
        load_model(MODELS / "decode") as decode,
        load_model(MODELS / "layout") as layout,
        load_model(MODELS / "question") as tokenizer,
    ):
        for picture in pictures:
            pixels.append(decode.infer({"image": [[picture.encoded()]]})["pixels"])
            boxes.append(layout.infer({"pixels": pixels[-1]})["boxes"])
            texts, right = zip(*questions(picture, chance), strict=True)
            words = tokenizer.infer({"question": [[text.encode()] for text in texts]})["words"]
            asked.append(list(zip(words.tolist(), map(answers.index, right), strict=True)))
    return Lessons(torch.tensor(np.concatenate(pixels)), torch.tensor(np.concatenate(boxes)), asked)


def main() -> None:
    """Learn, export and say how good it is."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # Networks this small are slower with more.
    print(f"drawing {PICTURES} pictures", flush=True)
    known, unseen = prepare(PICTURES, random.Random(0)), prepare(200, random.Random(1))
    vision, fusion = Vision(), Fusion()
    train(vision, fusion, known)
    print(f"{accuracy(vision, fusion, unseen):.1%} of the questions about 200 pictures it has not seen are right")
    pixels, boxes, _, words, _ = unseen.batch([0])
    export("vision", vision, {"pixels": pixels}, "features")
    export("fusion", fusion, {"features": vision(pixels), "boxes": boxes, "words": words[:1]}, "logits")


def train(vision: Vision, fusion: Fusion, known: Lessons) -> None:
    """Teach both networks at once."""
    batches = math.ceil(len(known.asked) / BATCH)
    optimizer = torch.optim.AdamW([*vision.parameters(), *fusion.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=EPOCHS * batches)
    vision.train()
    for epoch in range(1, EPOCHS + 1):
        losses = []
        for chosen in torch.randperm(len(known.asked)).split(BATCH):
            pixels, boxes, picture, words, answer = known.batch(chosen.tolist())
            loss = cross_entropy(fusion(vision(pixels)[picture], boxes[picture], words), answer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch} of {EPOCHS}: loss {np.mean(losses):.3f}", flush=True)
    vision.eval()


@torch.no_grad()
def accuracy(vision: Vision, fusion: Fusion, unseen: Lessons) -> float:
    """Return how many of the questions are answered right, from 0 to 1."""
    pixels, boxes, picture, words, answer = unseen.batch(list(range(len(unseen.asked))))
    answered = fusion(vision(pixels)[picture], boxes[picture], words).argmax(1)
    return float((answered == answer).float().mean())


def export(name: str, network: nn.Module, inputs: dict[str, Tensor], output: str) -> None:
    """Write a network as ONNX, with the size of the batch left open."""
    path = MODELS / name / "1" / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    # The older of torch's two exporters: it needs no further package, and what it warns of is for its own developers.
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            network.eval(),
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=[output],
            dynamic_axes={tensor: {0: "batch"} for tensor in (*inputs, output)},
            dynamo=False,
        )


if __name__ == "__main__":
    main()
