"""Makes the weights of this pipeline: a WordPiece vocabulary and a small BERT, both learnt from ``sentences.py``.

    python examples/pipelines/bert_sentiment/train.py

Half a minute, and the same result each time. To serve a BERT of your own, put its ``tokenizer.json`` and
its ``model.onnx`` in the same two places; nothing else in this pipeline knows how large it is.
"""

from __future__ import annotations

import math
import re
import string
import warnings
from pathlib import Path

import numpy as np
import torch
from sentences import LABELS, reviews
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

MODELS = Path(__file__).resolve().parent / "models"
LONGEST = 64
EPOCHS = 5
BATCH = 32


def main() -> None:
    """Learn, export and say how good it is."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # Matrices this small are slower with more.
    known, unseen = reviews(5000, seed=0), reviews(500, seed=1)
    unseen = [entry for entry in unseen if entry not in known]
    tokenizer = learn_tokenizer([text for text, _ in known])
    tokenizer.save(str(MODELS / "tokenizer" / "1" / "tokenizer.json"))
    bert = BertForSequenceClassification(
        BertConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=LONGEST,
            num_labels=len(LABELS),
            # A network this narrow learns faster from larger beginnings, and forgets nothing worth forgetting.
            initializer_range=0.1,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )
    train(bert, tokenizer, known)
    print(f"{accuracy(bert, tokenizer, unseen):.1%} of {len(unseen)} reviews that it has not seen are right")
    export(bert, MODELS / "bert" / "1" / "model.onnx")


def learn_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a WordPiece tokenizer like BERT's: lower case, ``[CLS]`` in front, ``[SEP]`` at the end."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)})
    # What is no known word is spelt.
    letters = [prefix + letter for prefix in ("", "##") for letter in string.ascii_lowercase]
    pieces = dict.fromkeys([*special, *words, *letters])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.enable_truncation(LONGEST)
    return tokenizer


def train(bert: BertForSequenceClassification, tokenizer: Tokenizer, known: list[tuple[str, int]]) -> None:
    """Teach ``bert`` the reviews it may know."""
    steps = EPOCHS * math.ceil(len(known) / BATCH)
    optimizer = torch.optim.AdamW(bert.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)
    bert.train()
    for epoch in range(1, EPOCHS + 1):
        losses = []
        for chosen in torch.randperm(len(known)).split(BATCH):
            logits, labels = answers(bert, tokenizer, [known[index] for index in chosen])
            loss = cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch} of {EPOCHS}: loss {np.mean(losses):.3f}", flush=True)
    bert.eval()


def answers(
    bert: BertForSequenceClassification, tokenizer: Tokenizer, batch: list[tuple[str, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``bert`` says to a batch, and what it should have said."""
    encodings = tokenizer.encode_batch([text for text, _ in batch])
    longest = max(map(len, encodings))
    for encoding in encodings:
        encoding.pad(longest)
    input_ids = torch.tensor([encoding.ids for encoding in encodings])
    mask = torch.tensor([encoding.attention_mask for encoding in encodings])
    return bert(input_ids, mask).logits, torch.tensor([label for _, label in batch])


@torch.no_grad()
def accuracy(bert: BertForSequenceClassification, tokenizer: Tokenizer, unseen: list[tuple[str, int]]) -> float:
    """Return how many of ``unseen`` are right, from 0 to 1."""
    logits, labels = answers(bert, tokenizer, unseen)
    return float((logits.argmax(1) == labels).float().mean())


class Logits(torch.nn.Module):
    """BERT as a function of two tensors to one, which is what a server can call."""

    def __init__(self, bert: BertForSequenceClassification) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids, attention_mask).logits


def export(bert: BertForSequenceClassification, path: Path) -> None:
    """Write ``bert`` as ONNX, with the number of texts and their length left open."""
    path.parent.mkdir(exist_ok=True)
    example = torch.ones(2, 16, dtype=torch.long)
    free = {0: "batch", 1: "length"}
    # The older of torch's two exporters: it needs no further package, and what it warns of is for its own developers.
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            Logits(bert).eval(),
            (example, example),
            path,
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_axes={"input_ids": free, "attention_mask": free, "logits": {0: "batch"}},
            dynamo=False,
        )


if __name__ == "__main__":
    main()
