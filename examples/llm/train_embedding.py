"""Trains an embedding on questions and the docstrings that answer them, and embeds these to be found again.

    python examples/llm/train_embedding.py

Half a minute, and after train.py, whose tokenizer it takes. A text is the weighted mean of a vector for each of its
tokens; vectors and weights are learnt by contrast: of all passages of a batch, a question's own has to be the nearest.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import numpy as np
import torch
from corpus import facts
from lessons import question
from tokenizers import Tokenizer
from torch import nn

from nerite.testing import load_model

HERE = Path(__file__).resolve().parent
WIDTH = 192
ROWS = 256
SHARPNESS = 20.0
"""What similarities are multiplied with before they are compared."""


class Embedding(nn.Module):
    """The weighted mean of the vectors of tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.vectors = nn.EmbeddingBag(tokens, WIDTH, mode="sum")
        self.weights = nn.Embedding(tokens, 1)
        nn.init.zeros_(self.weights.weight)

    def forward(self, texts: list[list[int]]) -> torch.Tensor:
        """Return a vector of length 1 for the tokens of each text."""
        flat = torch.tensor([token for text in texts for token in text])
        starts = torch.tensor([0, *map(len, texts[:-1])]).cumsum(0)
        together = self.vectors(flat, starts, per_sample_weights=self.weights(flat).squeeze(1).exp())
        return nn.functional.normalize(together, dim=1)


def main() -> None:
    """Train, store, embed all passages, and say how often the right one is found."""
    parser = argparse.ArgumentParser(description="train the embedding")
    parser.add_argument("--passes", type=int, default=20, help="how often each passage is shown (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=HERE / "models", help="the repository (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    chance = random.Random(0)
    folder = options.models / "embed" / "1"
    shutil.copy(options.models / "docent" / "1" / "tokenizer.json", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = facts()
    passages = [f"{fact.name}: {fact.sentence}" for fact in known]
    numbered = [encoding.ids for encoding in tokenizer.encode_batch(passages)]

    model = Embedding(tokenizer.get_vocab_size())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(options.passes):
        for rows in torch.randperm(len(known)).split(ROWS):
            asked = [question(known[row], chance) for row in rows]
            questions = model([encoding.ids for encoding in tokenizer.encode_batch(asked)])
            likeness = SHARPNESS * questions @ model([numbered[row] for row in rows]).T
            right = torch.arange(len(rows))
            loss = nn.functional.cross_entropy(likeness, right) + nn.functional.cross_entropy(likeness.T, right)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weighted = model.vectors.weight * model.weights.weight.exp()
    np.save(folder / "vectors.npy", weighted.detach().numpy())

    with load_model(options.models / "embed") as embed:

        def embedded(texts: list[str]) -> np.ndarray:
            return np.concatenate([embed.infer({"text_input": [[text.encode()]]})["embedding"] for text in texts])

        vectors = embedded(passages)
        asked = [question(fact, chance) for fact in known]
        found = (embedded(asked) @ vectors.T).argsort(axis=1)[:, ::-1][:, :3]
    place = options.models / "find" / "1"
    np.save(place / "vectors.npy", vectors)
    (place / "passages.json").write_text(json.dumps(passages))
    right = (found == np.arange(len(known))[:, None]).any(axis=1).mean()
    print(f"{len(known)} passages; for {right:.0%} of the questions the right one is among the first three")


if __name__ == "__main__":
    main()
