"""Differences between the signatures and configurations of two loaded versions. Pure.

What clients send to the baseline must be accepted by the candidate, and what they read from its responses must be in
the candidate's: that decides which differences block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from nerite.config.loading import select_versions
from nerite.config.model_config import (
    ModelConfig,
    ModelInstanceGroup,
    ModelQueuePolicy,
    ModelSequenceBatching,
    ModelVersionPolicy,
)
from nerite.core.signature import Signature, SignatureInput, SignatureOutput, shape_text
from nerite.rollouts.difference import Difference, blocks, notes, warns

_FOR_CHATS: Final = frozenset({"CHAT_TEMPLATE", "TOOL_CALL_PARSER"})


def signature_differences(baseline: Signature, candidate: Signature) -> Iterator[Difference]:
    """Yield the differences between two signatures."""
    yield from _batch_sizes(baseline.max_batch_size, candidate.max_batch_size)
    for name, before in baseline.inputs.items():
        after = candidate.inputs.get(name)
        if after is None:
            yield blocks(f"input '{name}'", _tensor(before), "", "Requests with this input are refused.")
        else:
            yield from _input(before, after)
    for name in candidate.inputs.keys() - baseline.inputs.keys():
        added = candidate.inputs[name]
        if added.optional:
            yield notes(f"input '{name}'", "", _tensor(added), "Only the candidate accepts this input.")
        else:
            yield blocks(f"input '{name}'", "", _tensor(added), "Requests without this input are refused.")
    for name, given in baseline.outputs.items():
        there = candidate.outputs.get(name)
        if there is None:
            yield blocks(f"output '{name}'", _tensor(given), "", "Clients that read this output get none.")
        else:
            yield from _output(given, there)
    for name in candidate.outputs.keys() - baseline.outputs.keys():
        text = "Responses to requests that name no outputs become larger."
        yield notes(f"output '{name}'", "", _tensor(candidate.outputs[name]), text)


def _batch_sizes(baseline: int, candidate: int) -> Iterator[Difference]:
    if bool(baseline) != bool(candidate):
        text = "The shapes of all tensors differ by the batch dimension, so every request is refused."
        yield blocks("max_batch_size", baseline, candidate, text)
    elif candidate < baseline:
        yield blocks("max_batch_size", baseline, candidate, f"Requests of more than {candidate} rows are refused.")
    elif candidate > baseline:
        yield notes("max_batch_size", baseline, candidate, "The candidate accepts larger requests and batches.")


def _input(baseline: SignatureInput, candidate: SignatureInput) -> Iterator[Difference]:
    subject = f"input '{baseline.name}'"
    if baseline.datatype is not candidate.datatype:
        yield blocks(subject, _tensor(baseline), _tensor(candidate), "Requests with this input are refused.")
    elif baseline.dims != candidate.dims:
        if _covers(candidate.dims, baseline.dims):
            text = "The candidate accepts more shapes."
            yield notes(subject, _tensor(baseline), _tensor(candidate), text)
        else:
            text = "Requests with other shapes than the candidate's are refused."
            yield blocks(subject, _tensor(baseline), _tensor(candidate), text)
    if baseline.optional and not candidate.optional:
        yield blocks(subject, "optional", "required", "Requests without this input are refused.")
    elif candidate.optional and not baseline.optional:
        yield notes(subject, "required", "optional", "The candidate accepts requests without this input.")
    if baseline.ragged != candidate.ragged:
        text = "Requests of different shapes share a batch in one of the two only, so their load differs."
        yield warns(f"{subject}, ragged batches", _allowed(baseline.ragged), _allowed(candidate.ragged), text)


def _output(baseline: SignatureOutput, candidate: SignatureOutput) -> Iterator[Difference]:
    subject = f"output '{baseline.name}'"
    if baseline.datatype is not candidate.datatype:
        text = "Clients read other bytes than they expect."
        yield blocks(subject, _tensor(baseline), _tensor(candidate), text)
    elif baseline.dims != candidate.dims:
        if _covers(baseline.dims, candidate.dims):
            text = "The candidate's shape is one that the baseline may return, too."
            yield notes(subject, _tensor(baseline), _tensor(candidate), text)
        else:
            text = "Clients get shapes that the baseline never returns."
            yield blocks(subject, _tensor(baseline), _tensor(candidate), text)
    if baseline.labels != candidate.labels:
        before, after = _first_difference(baseline.labels, candidate.labels)
        text = "Clients that ask for classes get other names."
        yield warns(f"labels of {subject}", before, after, text)


def _covers(wide: Sequence[int], narrow: Sequence[int]) -> bool:
    """Return whether every shape of the dimensions ``narrow`` is one of ``wide``."""
    return len(wide) == len(narrow) and all(of in (-1, size) for of, size in zip(wide, narrow, strict=True))


def _tensor(declared: SignatureInput | SignatureOutput) -> str:
    return f"{declared.datatype.name} {shape_text(declared.dims)}"


def _allowed(allowed: bool) -> str:
    return "allowed" if allowed else "not allowed"


def _first_difference(baseline: Sequence[str], candidate: Sequence[str]) -> tuple[str, str]:
    """Return the first different line of each, with its number."""
    for number in range(max(len(baseline), len(candidate))):
        before, after = baseline[number : number + 1], candidate[number : number + 1]
        if before != after:
            return tuple(f"line {number + 1}: {each[0]}" if each else "no more" for each in (before, after))  # type: ignore[return-value]
    return "", ""


def configuration_differences(baseline: ModelConfig, candidate: ModelConfig) -> Iterator[Difference]:
    """Yield the differences between two complete configurations, apart from the tensors and ``max_batch_size``."""
    yield from _response_counts(baseline, candidate)
    yield from _scheduling(baseline, candidate)
    yield from _queues(baseline, candidate)
    if _platform(baseline) != _platform(candidate):
        text = "Another framework runs the model: expect other numerics, latencies and memory."
        yield warns("backend", _platform(baseline), _platform(candidate), text)
    before, after = _placement(baseline.instance_group), _placement(candidate.instance_group)
    if before != after:
        text = "The two have different capacity, so their latencies under load are not comparable."
        yield warns("instances", before, after, text)
    one, other = _cached(baseline), _cached(candidate)
    if one != other:
        text = "One of the two answers repeated requests from the cache, so latencies are not comparable."
        yield warns("response_cache", one, other, text)
    for name in sorted(baseline.parameters.keys() | candidate.parameters.keys()):
        one, other = _parameter(baseline, name), _parameter(candidate, name)
        if one != other:
            kind = warns if name in _FOR_CHATS else notes
            text = "Chats are turned into other prompts." if name in _FOR_CHATS else "The model may behave differently."
            yield kind(f"parameter '{name}'", one, other, text)
    if baseline.model_warmup and not candidate.model_warmup:
        text = "The candidate's first requests may be slow, which counts against it."
        yield notes("model_warmup", f"{len(baseline.model_warmup)} samples", "", text)


def _cached(config: ModelConfig) -> str:
    return "enabled" if config.response_cache and config.response_cache.enable else "disabled"


def _parameter(config: ModelConfig, name: str) -> str:
    return config.parameters[name].string_value if name in config.parameters else ""


def _response_counts(baseline: ModelConfig, candidate: ModelConfig) -> Iterator[Difference]:
    before, after = (_is_decoupled(each) for each in (baseline, candidate))
    if before == after:
        return
    if after:
        text = "Requests over HTTP's infer endpoint and gRPC's ModelInfer are refused: the candidate needs a stream."
    else:
        text = "Clients that read a stream get one response, all at once at the end."
    yield blocks("decoupled", str(before).lower(), str(after).lower(), text)


def _is_decoupled(config: ModelConfig) -> bool:
    return bool(config.model_transaction_policy and config.model_transaction_policy.decoupled)


def _scheduling(baseline: ModelConfig, candidate: ModelConfig) -> Iterator[Difference]:
    before, after = (_scheduler(each) for each in (baseline, candidate))
    if before == after:
        if baseline.sequence_batching is not None and candidate.sequence_batching is not None:
            yield from _sequences(baseline.sequence_batching, candidate.sequence_batching)
        return
    if "sequence_batching" in (before, after):
        text = (
            "Requests without a sequence id are refused."
            if after == "sequence_batching"
            else "Requests of a sequence are executed independently, without its state."
        )
        yield blocks("scheduler", before, after, text)
    else:
        yield warns("scheduler", before, after, "Requests are batched differently, so load and latencies differ.")


def _scheduler(config: ModelConfig) -> str:
    for name in ("sequence_batching", "dynamic_batching", "ensemble_scheduling"):
        if getattr(config, name) is not None:
            return name
    return "no batching"


def _sequences(baseline: ModelSequenceBatching, candidate: ModelSequenceBatching) -> Iterator[Difference]:
    idle, after = baseline.max_sequence_idle_microseconds, candidate.max_sequence_idle_microseconds
    if idle != after:
        yield warns("max_sequence_idle_microseconds", idle, after, "Sequences that pause are ended at different times.")
    one, other = _controls(baseline), _controls(candidate)
    if one != other:
        yield notes("sequence controls and states", one, other, "The models see other control inputs.")


def _controls(batching: ModelSequenceBatching) -> str:
    return ", ".join([each.name for each in batching.control_input] + [each.input_name for each in batching.state])


def _queues(baseline: ModelConfig, candidate: ModelConfig) -> Iterator[Difference]:
    before, after = baseline.dynamic_batching, candidate.dynamic_batching
    if before is None or after is None:
        return
    if before.preferred_batch_size != after.preferred_batch_size:
        text = "Batches are started at other sizes."
        yield notes("preferred_batch_size", list(before.preferred_batch_size), list(after.preferred_batch_size), text)
    for name, kind, text in (
        ("max_queue_delay_microseconds", notes, "Requests wait for their batch for another time."),
        ("preserve_ordering", notes, "Responses are held back for order in one of the two only."),
        ("priority_levels", warns, "Requests with a priority are treated differently."),
        ("default_priority_level", warns, "Requests without a priority are treated differently."),
    ):
        if getattr(before, name) != getattr(after, name):
            yield kind(name, getattr(before, name), getattr(after, name), text)
    yield from _policy("default_queue_policy", before.default_queue_policy, after.default_queue_policy)
    for level in sorted(before.priority_queue_policy.keys() | after.priority_queue_policy.keys()):
        one, other = before.priority_queue_policy.get(level), after.priority_queue_policy.get(level)
        yield from _policy(f"queue policy of priority {level}", one, other)


def _policy(
    subject: str, baseline: ModelQueuePolicy | None, candidate: ModelQueuePolicy | None
) -> Iterator[Difference]:
    before, after = baseline or ModelQueuePolicy(), candidate or ModelQueuePolicy()
    if _timeout(before) != _timeout(after):
        text = "Requests that wait are given up at different times, so error rates and tails are not comparable."
        yield warns(f"{subject}, timeout", _timeout(before), _timeout(after), text)
    if before.max_queue_size != after.max_queue_size:
        one, other = before.max_queue_size or "unlimited", after.max_queue_size or "unlimited"
        text = "Under load, one of the two refuses requests earlier."
        yield warns(f"{subject}, max_queue_size", one, other, text)


def _timeout(policy: ModelQueuePolicy) -> str:
    timeout = policy.default_timeout_microseconds
    if not timeout:
        return ""
    override = ", requests may shorten it" if policy.allow_timeout_override else ""
    return f"{timeout} us, then {policy.timeout_action.lower()}{override}"


def _platform(config: ModelConfig) -> str:
    return config.backend or config.platform


def _placement(groups: Iterable[ModelInstanceGroup]) -> str:
    return ", ".join(
        f"{group.count} x {group.kind}"
        + (f" on GPU {', '.join(map(str, group.gpus))}" if group.gpus else "")
        + (" (passive)" if group.passive else "")
        for group in groups
    )


def policy_differences(
    policy: ModelVersionPolicy | None, running: Iterable[int], baseline: int, candidate: int
) -> Iterator[Difference]:
    """Yield a difference if the version policy would not select the candidate after the rollout."""
    if policy is None:
        return
    selected = select_versions(policy, {*running, baseline, candidate}, "").numbers
    if candidate in selected and max(selected) == candidate:
        return
    default = max(selected, default=0)
    text = (
        f"After the rollout the version policy selects {', '.join(map(str, selected)) or 'none'}: "
        "change version_policy, or the model falls back."
    )
    yield warns("version_policy", f"selects {default}" if default else "selects none", f"version {candidate}", text)
