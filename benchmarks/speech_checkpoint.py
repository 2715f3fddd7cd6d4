"""A Whisper of random weights, as a checkpoint of Hugging Face, and recordings for it.

It writes nonsense, the same for the same recording, and as much of it as a trained one at most. Speed does not depend
on what weights say.
"""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any, Final

import numpy as np

RATE: Final = 16_000
# Width, layers of encoder and decoder each, heads: those of OpenAI's models of these names, and a smaller one.
SIZES: Final = {"mini": (64, 2, 2), "tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}
LANGUAGES: Final = ("en", "de", "fr", "es")
_TIMES: Final = 1501


def write(size: str, folder: Path) -> None:
    """Write a checkpoint into ``folder``."""
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    names = _write_tokenizer(folder)
    tokens = {name: number for number, name in enumerate(names)}
    width, layers, heads = SIZES[size]
    torch.manual_seed(0)
    end, start = tokens["<|endoftext|>"], tokens["<|startoftranscript|>"]
    config = WhisperConfig(
        vocab_size=len(names),
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        begin_suppress_tokens=[end],
        suppress_tokens=[],
    )
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for weights in model.model.decoder.parameters():
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=0.08)
    model.save_pretrained(folder)
    generation = {
        "decoder_start_token_id": start, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
        "is_multilingual": True, "lang_to_id": {f"<|{code}|>": tokens[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {name: tokens[f"<|{name}|>"] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": tokens["<|notimestamps|>"], "prev_sot_token_id": tokens["<|startofprev|>"],
        "max_initial_timestamp_index": 50, "max_length": 448, "begin_suppress_tokens": [end],
        "suppress_tokens": [], "return_timestamps": False,
        "alignment_heads": [[layer, head] for layer in range(layers // 2, layers) for head in range(2)],
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation))
    WhisperFeatureExtractor().save_pretrained(folder)


def _write_tokenizer(folder: Path) -> list[str]:
    """Write a tokenizer of some words and Whisper's own tokens; return them all in the order of their numbers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import WhisperTokenizerFast

    bytes_of = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left in "Ġaeiou" for right in "abcdefghijklmnopqrstuvwxyz"]
    words = bytes_of + ["".join(pair) for pair in merges]
    special = [
        "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>",
        "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
    ]  # fmt: skip
    times = [f"<|{number * 0.02:.2f}|>" for number in range(_TIMES)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in times])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    folder.mkdir(parents=True, exist_ok=True)
    made = WhisperTokenizerFast(
        tokenizer_object=tokenizer, unk_token=special[0], bos_token=special[0], eos_token=special[0]
    )
    made.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in merges))
    return [*words, *special, *times]


def recording(seconds: float, seed: int = 0) -> Any:
    """Return samples in which a pitch moves as in speech, with pauses and noise."""
    random = np.random.default_rng(seed)
    at = np.arange(int(seconds * RATE)) / RATE
    pitch = 140 + 30 * np.sin(2 * np.pi * 0.7 * at) + 10 * seed
    loud = np.clip(np.sin(2 * np.pi * 2.5 * at) + 0.3, 0, 1)
    voice = sum(np.sin(2 * np.pi * np.cumsum(pitch * part) / RATE) / part for part in (1, 2, 3, 5, 8))
    return (0.2 * voice * loud + 0.01 * random.standard_normal(len(at))).astype(np.float32)


def wav(samples: Any) -> bytes:
    """Return a WAV file of 16 bits."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return made.getvalue()
