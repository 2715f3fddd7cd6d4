"""Differences between two language models: tokens, chats, sampling, stops, engine, context window. Pure.

The facts are those of ``nerite.llm.openai.inspection``, as JSON, and the reports of running engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, Final

from nerite.core.engine_report import EngineReport
from nerite.rollouts.difference import Difference, blocks, notes, warns

Facts = Mapping[str, Any]
_AROUND: Final = 40
"""Characters or tokens that are shown from the first difference on."""
_SHOWN: Final = 3
"""Probe texts that are shown."""


def language_differences(baseline: Facts, candidate: Facts) -> Iterator[Difference]:
    """Yield the differences between two models' files."""
    yield from _tokens(baseline, candidate, baseline["probes"])
    yield from _chats(baseline["rendered"], candidate["rendered"])
    for name, before, after in _changed(baseline["sampling"], candidate["sampling"]):
        text = (
            "Clients that take their sampling from generation_config.json sample differently; the server applies none."
        )
        yield warns(f"sampling default '{name}'", before, after, text)
    for name, before, after in _changed(baseline["stops"], candidate["stops"]):
        text = "Texts end elsewhere: too early, or only at max_tokens."
        yield warns(f"stop tokens '{name}'", before, after, text)
    if baseline["engine"] != candidate["engine"]:
        text = "Another engine or release runs the model: expect other latencies, and other texts for equal seeds."
        yield warns("engine", baseline["engine"], candidate["engine"], text)
    for name, before, after in _changed(baseline["config"], candidate["config"]):
        text = "The architecture differs, so quality and speed may, too."
        yield notes(f"config.json '{name}'", before, after, text)
    for name, before, after in _changed(baseline["arguments"], candidate["arguments"]):
        if name not in ("model", "tokenizer"):
            yield notes(f"engine argument '{name}'", before, after, "The engine may behave differently.")


def _tokens(baseline: Facts, candidate: Facts, probes: Mapping[str, str]) -> Iterator[Difference]:
    before, after = baseline["ids"], candidate["ids"]
    if not (before and after):
        changed = [name for name, *_ in _changed(baseline["tokenizer_files"], candidate["tokenizer_files"])]
        if changed:
            why = baseline["why_no_ids"] or candidate["why_no_ids"]
            text = f"The same texts may become other tokens; they were not compared ({why})."
            yield warns("tokenizer files", "", f"{', '.join(changed)} differ", text)
        return
    different = [name for name in probes if before.get(name) != after.get(name)]
    # A model of another family has its own tokenizer. In the same one it is a mistake.
    family = [each["config"].get("model_type") for each in (baseline, candidate)]
    kind = blocks if family[0] == family[1] else warns
    for name in different[:_SHOWN]:
        more = len(different) - _SHOWN
        others = (
            f" ({more} more of {len(probes)} probe texts differ)" if more > 0 and name == different[_SHOWN - 1] else ""
        )
        one, other = _ids_around(before[name], after[name])
        what = _quoted(probes[name])
        text = f"The text {what} becomes other tokens, which the model may not have been trained on{others}."
        yield kind(f"tokenizer, probe text '{name}'", one, other, text)


def _ids_around(baseline: list[int], candidate: list[int]) -> tuple[str, str]:
    """Return the token ids of both from shortly before the first difference on."""
    at = next((at for at, (one, other) in enumerate(zip_longest(baseline, candidate)) if one != other), 0)
    start = max(at - 2, 0)
    return _ids(baseline, start), _ids(candidate, start)


def _ids(ids: list[int], start: int) -> str:
    shown = ids[start : start + 12]
    ends = "" if start + 12 >= len(ids) else " …"
    return f"{len(ids)} ids: {'… ' if start else ''}{' '.join(map(str, shown))}{ends}"


def _chats(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> Iterator[Difference]:
    for name, before, after in _changed(baseline, candidate):
        one, other = str(before or ""), str(after or "")
        if other.startswith("refused: ") and not one.startswith("refused: "):
            text = "The candidate's chat template refuses such chats."
            yield blocks(f"chat template, {name}", _quoted(one), other, text)
            continue
        at = next((at for at, (here, there) in enumerate(zip_longest(one, other)) if here != there), 0)
        start = max(at - _AROUND // 2, 0)
        text = "The same chat becomes another prompt, so answers and the prefix cache differ."
        yield warns(
            f"chat template, {name}",
            f"from character {start}: {_quoted(one[start : start + 2 * _AROUND])}",
            f"from character {start}: {_quoted(other[start : start + 2 * _AROUND])}",
            text,
        )


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 2 * _AROUND else f"{text[: 2 * _AROUND]}…")


def _changed(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*baseline, *candidate)):
        before, after = baseline.get(name), candidate.get(name)
        if before != after:
            yield name, before, after


def engine_differences(baseline: EngineReport, candidate: EngineReport) -> Iterator[Difference]:
    """Yield the differences between two running engines."""
    if candidate.context_length < baseline.context_length:
        text = f"Prompts that need more than {candidate.context_length} tokens with their answer are refused or cut."
        yield blocks("context window", baseline.context_length, candidate.context_length, text)
    elif candidate.context_length > baseline.context_length:
        text = "Only the candidate accepts prompts that long."
        yield notes("context window", baseline.context_length, candidate.context_length, text)
    before, after = (each.total_blocks * each.block_size for each in (baseline, candidate))
    if before and after and after * 10 < before * 9:
        text = "The candidate's KV cache holds fewer tokens: it queues requests and preempts earlier."
        yield warns("KV cache tokens", before, after, text)
    elif before and after and before * 10 < after * 9:
        text = "The candidate's KV cache holds more tokens."
        yield notes("KV cache tokens", before, after, text)
    if baseline.max_sequences != candidate.max_sequences:
        one, other = (each.max_sequences or "unlimited" for each in (baseline, candidate))
        text = "The two run different numbers of sequences at once, so latencies under load are not comparable."
        yield warns("sequences at once", one, other, text)
