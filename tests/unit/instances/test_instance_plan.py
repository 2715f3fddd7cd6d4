"""Which instances the groups of a model ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from nerite.config.flag import HostPolicy
from nerite.config.model_config import ModelConfig, ModelInstanceGroup, ModelRateLimiter
from nerite.core.errors import NeriteError, Unsupported
from nerite.instances.placement import HostPolicies, InstancePlan, instance_plans
from nerite.scheduling.rate_limiter import ResourceClaim, ResourcePool

CORES = tuple(sorted(os.sched_getaffinity(0)))
FIRST, LAST = CORES[0], CORES[-1]


def plans(*groups: ModelInstanceGroup, policies: Sequence[tuple[str, str, str]] = ()) -> list[InstancePlan]:
    named = HostPolicies(HostPolicy(*policy) for policy in policies)
    return instance_plans(ModelConfig(name="m", instance_group=groups), named)


def test_names_kinds_and_devices() -> None:
    made = plans(
        ModelInstanceGroup(name="a", kind="KIND_CPU", count=2),
        ModelInstanceGroup(name="b", kind="KIND_GPU", count=2, gpus=(1, 3)),
        ModelInstanceGroup(name="c", kind="KIND_MODEL", passive=True),
    )
    assert [(plan.context.name, plan.context.kind, plan.context.device, plan.passive) for plan in made] == [
        ("a_0", "CPU", 0, False),
        ("a_1", "CPU", 0, False),
        ("b_0", "GPU", 1, False),
        ("b_1", "GPU", 1, False),
        ("b_2", "GPU", 3, False),
        ("b_3", "GPU", 3, False),
        ("c_0", "MODEL", 0, True),
    ]


def test_needs_are_on_the_instance_s_device_or_everywhere() -> None:
    limiter = ModelRateLimiter(
        priority=3,
        resources=(
            ModelRateLimiter.Resource(name="all", global_=True, count=2),
            ModelRateLimiter.Resource(name="here", count=7),
            ModelRateLimiter.Resource(name="none", count=0),
            ModelRateLimiter.Resource(name="here", count=1),
        ),
    )
    (plan,) = plans(ModelInstanceGroup(name="g", kind="KIND_GPU", gpus=(2,), rate_limiter=limiter))
    assert plan.claim == ResourceClaim(((ResourcePool("all"), 2), (ResourcePool("here", 2), 1)), 3)


def test_how_many_share_cores() -> None:
    one, two = (ModelInstanceGroup(name=name, kind="KIND_CPU", count=2, host_policy=name) for name in ("one", "two"))
    free = ModelInstanceGroup(name="free", kind="KIND_CPU", count=3)
    made = plans(one, two, free, policies=[(name, "cpu-cores", f"{FIRST}-{FIRST}") for name in ("one", "two")])
    assert [(plan.context.cores, plan.context.sharing) for plan in made] == [((FIRST,), 4)] * 4 + [((), 3)] * 3


@pytest.mark.parametrize(
    ("group", "policy"),
    [
        (ModelInstanceGroup(name="g", kind="KIND_CPU"), "cpu"),
        (ModelInstanceGroup(name="g", kind="KIND_MODEL"), "model"),
        (ModelInstanceGroup(name="g", kind="KIND_GPU", gpus=(4,)), "gpu_4"),
        (ModelInstanceGroup(name="g", kind="KIND_GPU", gpus=(4,), host_policy="mine"), "mine"),
    ],
)
def test_each_kind_has_a_policy_of_its_own(group: ModelInstanceGroup, policy: str) -> None:
    (plan,) = plans(group, policies=[(policy, "cpu-cores", f"{FIRST}-{FIRST}")])
    assert plan.context.cores == (FIRST,)
    (plan,) = plans(group, policies=[("other", "cpu-cores", "nonsense")])
    assert plan.context.cores == ()


def machine(folder: Path, **nodes: str) -> Path:
    """The folder of a machine with these nodes."""
    for name, cores in nodes.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "cpulist").write_text(f"{cores}\n")
    return folder


def place(nodes: Path, **settings: str) -> tuple[tuple[int, ...], int]:
    named = [HostPolicy("p", name.replace("_", "-"), value) for name, value in settings.items()]
    return HostPolicies(named, nodes).place("p")


def test_the_cores_of_a_node(tmp_path: Path) -> None:
    nodes = machine(tmp_path, node0=f"900-901,{LAST}", node1=f"0-{LAST}", node2="")
    assert place(nodes, numa_node="0") == ((LAST,), 0)
    assert place(nodes, numa_node="1") == (CORES, 1)
    assert place(nodes, numa_node="1", cpu_cores=f"{LAST}-999") == ((LAST,), 1)


def test_the_last_word_on_a_setting_holds() -> None:
    named = [HostPolicy("p", "cpu-cores", value) for value in ("nonsense", f"{LAST}-{LAST}")]
    assert HostPolicies(named).place("p") == ((LAST,), -1)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            {"cpu_cores": "3"},
            "INVALID_ARG: host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got 3",
        ),
        ({"cpu_cores": "a-3"}, "INVALID_ARG: Parsing 'cpu-cores' value: Can't parse 'a' to integer"),
        ({"cpu_cores": "0-,3"}, "INVALID_ARG: Parsing 'cpu-cores' value: Can't parse ',3' to integer"),
        ({"numa_node": "x"}, "INVALID_ARG: Parsing 'numa-node' value: Can't parse 'x' to integer"),
        (
            {"numa_node": "9"},
            "INTERNAL: Unable to set NUMA memory policy: Invalid argument. Host policy 'p' names node 9; this machine "
            "has 0, 2.",
        ),
        (
            {"cpu_cores": "900-901"},
            "INTERNAL: Unable to set NUMA thread affinity: Success. Host policy 'p' names none of the cores that this "
            f"server may use: {', '.join(map(str, CORES))}.",
        ),
    ],
)
def test_policies_that_cannot_be_followed(tmp_path: Path, settings: dict[str, str], refusal: str) -> None:
    nodes = machine(tmp_path, node0="0-1", node2="2-3")
    with pytest.raises(NeriteError) as raised:
        place(nodes, **settings)
    assert f"{raised.value.code}: {raised.value.message}" == refusal


def test_a_machine_without_nodes(tmp_path: Path) -> None:
    with pytest.raises(NeriteError, match="this machine has no nodes"):
        place(tmp_path, numa_node="0")


def test_a_system_that_has_no_say_in_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(Unsupported, match="this system has no processor affinity"):
        place(Path(), cpu_cores="0-0")
