"""Trains a small language model on what Python says about itself, and makes it a model to be served.

    python examples/llm/train.py

A few minutes on two cores. The version directory gets a checkpoint of Hugging Face (architecture Llama, safetensors,
tokenizer, chat template), and beside it the same model for OpenVINO. The seeds are fixed: the same machine, with the
same releases of Python and PyTorch, makes the same model again.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from corpus import Fact, facts, pages
from export import export
from lessons import lessons
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
VOCABULARY = 4096
CONTEXT = 512
HEAD = 32
LENGTH, ROWS = 256, 4
"""Tokens of a row, and rows of a batch."""
RATE, WARM_UP = 1.5e-3, 60
PROSE = 8
"""A pass has the eighth part of the pages in it."""
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NOT_LEARNT = -100
"""What stands in the place of a token that is there to be read: questions, and what tools have said."""
SHOWN = ("Hello!", "What does str.split do?", "What is os.path.join for?", "Tell me about ValueError.")


def main() -> None:
    """Train, write the version directory, and have the model say something."""
    parser = argparse.ArgumentParser(description="train a small language model")
    parser.add_argument("--passes", type=int, default=9, help="how often each fact is told (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="end after so many, for a trial (default: all that there is to read)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=HERE / "models", help="the repository (default: %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    known = facts()
    tokenizer = learn_tokenizer(known)
    rows = to_rows(tokenizer, known, options.passes)
    if options.steps:
        rows = rows[: options.steps * ROWS]
    model = LlamaForCausalLM(config(tokenizer, options.width, options.layers))
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(known)} facts, {len(rows) * LENGTH / 1e6:.2f} million tokens, {size / 1e6:.1f} million parameters")
    train(model, rows)

    folder = options.models / "docent" / "1"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    export(folder)
    for question in SHOWN:
        print(f"{question:30}{answer(model, tokenizer, question)}")


def learn_tokenizer(known: list[Fact]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the commonest pieces of words; digits are tokens of their own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chance = random.Random(0)
    told = [message["content"] for lesson in lessons(known, chance) for message in lesson.messages]
    tokenizer.train_from_iterator(told + pages(), trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END_OF_TEXT)
    whole.chat_template = (HERE / "chat_template.jinja").read_text()
    return whole


def config(tokenizer: PreTrainedTokenizerFast, width: int, layers: int) -> LlamaConfig:
    """Return the shape of the model."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def to_rows(tokenizer: PreTrainedTokenizerFast, known: list[Fact], passes: int) -> torch.Tensor:
    """Return all that is read, in rows of equal length: (row, 0: what is read | 1: what is learnt of it, token)."""
    chance = random.Random(0)
    prose = pages()
    read: list[int] = []
    learnt: list[int] = []
    for _ in range(passes):
        texts = chance.sample(prose, len(prose) // PROSE)
        told = list(lessons(known, chance))
        for number, lesson in enumerate(told):
            # The template itself marks what the assistant says.
            encoded = tokenizer.apply_chat_template(
                lesson.messages, tools=lesson.tools or None, return_dict=True, return_assistant_tokens_mask=True
            )
            tokens = encoded["input_ids"]
            read += tokens
            said = zip(tokens, encoded["assistant_masks"], strict=True)
            learnt += [token if is_said else NOT_LEARNT for token, is_said in said]
            if number * len(texts) // len(told) < (number + 1) * len(texts) // len(told):
                tokens = [*tokenizer(texts.pop())["input_ids"], tokenizer.pad_token_id]
                read += tokens
                learnt += tokens
    count = len(read) // (LENGTH + 1)
    return torch.tensor([read, learnt])[:, : count * (LENGTH + 1)].view(2, count, LENGTH + 1).transpose(0, 1)


def train(model: LlamaForCausalLM, rows: torch.Tensor) -> None:
    """Show the model each row once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    batches = rows.split(ROWS)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1.0) * (1 - step / len(batches))
    )
    model.train()
    began = time.monotonic()
    for step, batch in enumerate(batches, 1):
        read, learnt = batch[:, 0, :-1], batch[:, 1, 1:]
        is_learnt = learnt != NOT_LEARNT
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(model.model(read).last_hidden_state[is_learnt])
        loss = nn.functional.cross_entropy(logits.float(), learnt[is_learnt])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == len(batches):
            print(
                f"{time.monotonic() - began:6.0f} s  step {step} of {len(batches)}  loss {loss.item():.2f}", flush=True
            )
    model.eval()


@torch.no_grad()
def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """Return the likeliest answer."""
    messages = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**asked, max_new_tokens=60, do_sample=False)
    return tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip()


if __name__ == "__main__":
    main()
