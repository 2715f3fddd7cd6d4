"""Language models of random weights, as checkpoints of Hugging Face, and prompts of so many tokens for them.

Speed does not depend on what weights say. The tokenizer is trained on the texts of Python's own library.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_VOCABULARY: Final = 8192
_TRAINED_ON: Final = 400
"""Files of the library."""
CONTEXT: Final = 16_384

# Parameters in millions: width, layers, heads, inner width.
SIZES: Final = {"30M": (512, 8, 8, 1376), "400M": (1536, 14, 16, 4096)}


def write(size: str, folder: Path) -> None:
    """Write a checkpoint into ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    width, layers, heads, inner = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_trained(), bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)


def texts() -> Iterator[str]:
    """Return the same texts on each machine with this Python."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.glob("*.py"))[:_TRAINED_ON]:
        yield file.read_text("utf-8", "replace")


def _trained() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


class Prompts:
    """Texts that the tokenizer of a checkpoint cuts into exactly so many tokens, each another one."""

    def __init__(self, checkpoint: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._tokens = self._tokenizer.encode("\n".join(texts())).ids
        self._at = 0

    def take(self, length: int) -> str:
        """Return a prompt of ``length`` tokens."""
        while True:
            self._at = (self._at + 97) % (len(self._tokens) - length)
            text: str = self._tokenizer.decode(self._tokens[self._at : self._at + length])
            # Cut out of its place a text may be cut otherwise, and half a character is none.
            if len(self._tokenizer.encode(text).ids) == length and "�" not in text:
                return text

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


def save(requests: list[tuple[str, int]], prompts: Prompts, file: Path) -> None:
    """Write requests, prompts and lengths of answers, with the tokens of the prompts."""
    file.write_text(json.dumps([[text, prompts.tokens(text), length] for text, length in requests]))
