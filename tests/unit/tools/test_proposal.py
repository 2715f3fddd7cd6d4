"""What settings follow from what was measured."""

from __future__ import annotations

from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelParameter
from nerite.tools.add.proposal import Advice, Latency, Proposal, Throughput, by_count, interleaved, propose

BATCHED = ModelConfig(max_batch_size=64, dynamic_batching=ModelDynamicBatching(max_queue_delay_microseconds=5))


def latencies(**milliseconds: float) -> list[Latency]:
    return [Latency(int(batch.removeprefix("b")), ms, ms / 2) for batch, ms in milliseconds.items()]


def settings(proposal: Proposal) -> dict[str, str]:
    return {each.setting: each.value for each in proposal.advice}


def test_the_smallest_batch_that_is_nearly_the_best() -> None:
    proposal = propose(BATCHED, latencies(b1=10, b2=11, b4=13, b8=16, b16=31, b32=60), [])
    assert proposal.changes["max_batch_size"] == 8
    assert settings(proposal) == {"max_batch_size": "8", "dynamic_batching": "{ }", "preferred_batch_size": ""}
    assert proposal.advice[0].reason == "500/s in 16.0 ms; 1 reaches 100/s in 10.0 ms, 32 533/s in 60.0 ms"
    applied = proposal.applied(BATCHED)
    assert (applied.max_batch_size, applied.instance_group) == (8, ())
    assert applied.dynamic_batching == ModelDynamicBatching(max_queue_delay_microseconds=5)


def test_batches_that_gain_nothing() -> None:
    proposal = propose(BATCHED, latencies(b1=10, b2=20, b4=39), [])
    assert proposal.changes == {"max_batch_size": 64, "dynamic_batching": None}
    assert proposal.advice[0].reason == "batching gains nothing: 103/s at best with 4, 100/s with 1"
    assert proposal.applied(BATCHED).dynamic_batching is None


def test_a_size_that_stands_out() -> None:
    proposal = propose(BATCHED, latencies(b1=10, b2=18, b4=20, b8=55, b16=80), [])
    assert settings(proposal)["max_batch_size"] == "4"
    proposal = propose(BATCHED, latencies(b1=10, b2=18, b4=20, b8=55, b16=70), [])
    assert settings(proposal) == {"max_batch_size": "16", "dynamic_batching": "{ }", "preferred_batch_size": "[ 4 ]"}
    assert proposal.changes["dynamic_batching"].preferred_batch_size == (4,)


def test_a_model_without_batches() -> None:
    proposal = propose(ModelConfig(), [Latency(1, 10, 9)], [])
    assert proposal.advice == ()
    assert proposal.applied(ModelConfig()) == ModelConfig()


def test_instances() -> None:
    measured = [Throughput(1, (100, 98, 103)), Throughput(2, (180, 170, 181)), Throughput(4, (190, 185, 191))]
    more = propose(ModelConfig(), [], measured)
    assert settings(more) == {"instance_group": "[ { count: 2 } ]"}
    assert more.applied(ModelConfig()).instance_group[0].count == 2
    same = propose(ModelConfig(), [], [Throughput(1, (100, 99)), Throughput(2, (110, 111))])
    assert settings(same) == {"instance_group": ""}
    assert same.advice[0].reason == "more instances gain little: 100/s (99 to 100) with 1, 110/s (110 to 111) with 2"
    assert same.applied(ModelConfig()).instance_group == ()


def test_a_gain_within_the_noise_changes_nothing() -> None:
    """The median is 40 % higher, but one repeat with one instance was as fast."""
    noisy = [Throughput(1, (100, 145, 99, 101)), Throughput(2, (140, 142, 139, 150))]
    assert settings(propose(ModelConfig(), [], noisy)) == {"instance_group": ""}


def test_repeats_are_interleaved() -> None:
    assert interleaved((1, 2), 4) == [1, 2, 2, 1, 1, 2, 2, 1]
    assert by_count([(1, 90.0), (2, 150.0), (2, 140.0), (1, 100.0)]) == [
        Throughput(1, (90.0, 100.0)), Throughput(2, (150.0, 140.0))
    ]  # fmt: skip


def test_a_precision_is_a_parameter_beside_those_that_are_set() -> None:
    config = ModelConfig(backend="openvino", parameters={"NUM_STREAMS": ModelParameter(string_value="1")})
    proposal = propose(config, [], [], precision=Advice("INFERENCE_PRECISION_HINT", "f32", "it differs"))
    assert settings(proposal) == {"INFERENCE_PRECISION_HINT": "f32"}
    applied = {name: parameter.string_value for name, parameter in proposal.applied(config).parameters.items()}
    assert applied == {"NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": "f32"}
