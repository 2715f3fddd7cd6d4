"""The tables of a pool: TLS, balancing, scaling, placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from nerite.autoscaling.policy import MOST_MEMBERS, ScalingPolicy
from nerite.balancing.member import ServerKind
from nerite.balancing.model_placement import PlacementPolicy
from nerite.balancing.policy import ChoicePolicy, EjectionPolicy, PoolPolicy
from nerite.cluster.addresses import MAX_MEMBERS
from nerite.cluster.kubernetes_names import ScaleTarget, scale_target_of
from nerite.cluster.settings import (
    MemberSource,
    MemberTls,
    PlacedModel,
    PlacementSettings,
    PortTls,
    RolloutSettings,
    ServerResources,
)
from nerite.cluster.table_reader import (
    KeyPath,
    TableKey,
    TableReader,
    read_amount,
    read_count,
    read_flag,
    read_key,
    read_number,
    read_one_of,
    read_text,
)
from nerite.config.rollout_spec import RolloutSpec, WhenLost, read_spec
from nerite.core.durations import duration_of
from nerite.core.errors import InvalidArgument
from nerite.core.sizes import size_of
from nerite.judge.gates import LimitGate, parse_gate

_WITH_REPOSITORY: Final = (ServerKind.NERITE, ServerKind.TRITON)
"""Kinds of servers that load and unload models on request."""


BALANCING: Final[Mapping[str, TableKey]] = {
    "policy": TableKey("choice", read_one_of([str(policy) for policy in ChoicePolicy])),
    "prefix": TableKey("prefix", read_flag),
    "load-factor": TableKey("load_factor", read_number),
    "index-bytes": TableKey("index_bytes", read_count(0, 1 << 62)),
    "prefill-weight": TableKey("prefill_weight", read_number),
    "adapter-tokens": TableKey("adapter_tokens", read_number),
    "max-requests": TableKey("max_requests", read_number),
    "max-sequences": TableKey("max_sequences", read_count(0, 1 << 62)),
    "sequence-idle": TableKey("sequence_idle", duration_of),
    "retry-share": TableKey("retry_share", read_number),
    "retry-floor": TableKey("retry_floor", read_number),
    "hedge-quantile": TableKey("hedge_quantile", read_number),
}
"""Keys of balancing, which are written into the pool itself."""
_EJECTION: Final[Mapping[str, TableKey]] = {
    "consecutive-failures": TableKey("consecutive_failures", read_count(0, 1 << 62)),
    "failure-ratio": TableKey("failure_ratio", read_number),
    "request-volume": TableKey("request_volume", read_count(0, 1 << 62)),
    "interval": TableKey("interval", duration_of),
    "base-ejection": TableKey("base_ejection", duration_of),
    "max-ejection": TableKey("max_ejection", duration_of),
    "max-ejected": TableKey("max_ejected", read_number),
}
_PLACED_MODEL: Final[Mapping[str, TableKey]] = {
    "memory": TableKey("memory", size_of),
    "least": TableKey("least", read_count(0, MAX_MEMBERS)),
    "most": TableKey("most", read_count(0, MAX_MEMBERS)),
}
_PLACEMENT: Final[Mapping[str, TableKey]] = {**_PLACED_MODEL, "key": TableKey("key", read_key)}
_PLACEMENT_POLICY: Final[Mapping[str, TableKey]] = {
    "target": TableKey("target", read_number),
    "rise": TableKey("rise", duration_of),
    "fall": TableKey("fall", duration_of),
    "hold": TableKey("hold", duration_of),
    "retry": TableKey("retry", duration_of),
    "load-timeout": TableKey("patience", duration_of),
    "model-memory": TableKey("unknown_bytes", size_of),
}
_SCALING: Final[Mapping[str, TableKey]] = {
    "min": TableKey("least", read_count(0, MOST_MEMBERS)),
    "max": TableKey("most", read_count(1, MOST_MEMBERS)),
    "warm": TableKey("warm", read_count(0, MOST_MEMBERS)),
    "headroom": TableKey("headroom", read_number),
    "idle": TableKey("idle", duration_of),
    "stabilization": TableKey("stabilization", duration_of),
    "step": TableKey("step", read_number),
    "ttft": TableKey("ttft", duration_of),
    "itl": TableKey("itl", duration_of),
    "latency": TableKey("latency", duration_of),
    "share": TableKey("share", read_number),
    "rate": TableKey("rate", read_number),
    "concurrency": TableKey("concurrency", read_number),
    "actuator": TableKey("actuator", read_one_of(["kubernetes"])),
    "target": TableKey("target", scale_target_of),
}
_RESOURCES: Final[Mapping[str, TableKey]] = {
    "cpus": TableKey("cpus", read_amount),
    "gpus": TableKey("gpus", read_amount),
    "memory": TableKey("memory", size_of),
    "engine-places-gpus": TableKey("engine_places_gpus", read_flag),
}
_ROLLOUT: Final[Mapping[str, TableKey]] = {
    "unreachable": TableKey("unreachable", read_one_of([str(each) for each in WhenLost])),
    "key": TableKey("key", read_key),
}
_PORT_TLS: Final[Mapping[str, TableKey]] = {
    "certificate": TableKey("certificate", read_text),
    "key": TableKey("key", read_text),
    "client-ca": TableKey("client_ca", read_text),
}
_MEMBER_TLS: Final[Mapping[str, TableKey]] = {
    "ca": TableKey("ca", read_text),
    "certificate": TableKey("certificate", read_text),
    "key": TableKey("key", read_text),
    "server-name": TableKey("server_name", read_text),
}
_TLS_FILES: Final = ("ca", "certificate", "key", "client_ca")
"""Settings of TLS that are paths."""
TABLES: Final = ("ejection", "placement", "resources", "rollout", "scaling", "tls")
"""Tables of a pool."""


def port_tls(reader: TableReader, path: KeyPath, table: object) -> PortTls | None:
    """Return the TLS of the router's own ports; None if it is incomplete."""
    found = _tls(reader, path, table, _PORT_TLS)
    if "certificate" in found:
        return PortTls(**found)
    if isinstance(table, dict) and "certificate" not in table:
        reader.wrong(path, 'has no certificate: write a PEM file, as in certificate = "server.pem"')
    return None


def _tls(reader: TableReader, path: KeyPath, table: object, keys: Mapping[str, TableKey]) -> dict[str, Any]:
    """Return the settings of TLS in a table. A key needs its certificate."""
    values = reader.read(path, table, keys)
    for field in _TLS_FILES:
        if field in values:
            values[field] = reader.beside(values[field])
    if "key" in values and "certificate" not in values:
        reader.wrong((*path, "key"), "has an effect with certificate only, whose private key it is: add that")
    return values


def member_tls(reader: TableReader, path: KeyPath, given: object) -> MemberTls | None:
    """Return the TLS of the connections to members; None: they are plain."""
    if isinstance(given, bool):
        return MemberTls() if given else None
    if isinstance(given, dict):
        return MemberTls(**_tls(reader, path, given, _MEMBER_TLS))
    reader.wrong(path, 'must be true, or a table, as in tls = { ca = "ca.pem" }')
    return None


def balancing_of(reader: TableReader, path: KeyPath, table: Mapping[str, Any]) -> PoolPolicy:
    """Return how a pool balances."""
    values = reader.read(path, {key: table[key] for key in BALANCING if key in table}, BALANCING)
    if "choice" in values:
        values["choice"] = ChoicePolicy(values["choice"])
    try:
        if "ejection" in table:
            path = (*path, "ejection")
            values["ejection"] = EjectionPolicy(**reader.read(path, table["ejection"], _EJECTION))
            path = path[:-1]
        return PoolPolicy(**values)
    except InvalidArgument as error:
        reader.wrong(path, error.message)
        return PoolPolicy()


def scaling_of(
    reader: TableReader, path: KeyPath, table: Mapping[str, Any], source: MemberSource
) -> tuple[ScalingPolicy | None, ScaleTarget | None]:
    """Return when a pool gets more or fewer members, and the workload of Kubernetes that is scaled."""
    if "scaling" not in table:
        return None, None
    inner = (*path, "scaling")
    given = table["scaling"]
    values = reader.read(inner, given, _SCALING)
    if not isinstance(given, dict):
        return None, None
    target = _scale_target(reader, inner, values.pop("actuator", ""), values.pop("target", None), source)
    if "max" not in given:
        reader.wrong(inner, "has no max, the largest number of members: add it, as in max = 4")
        return None, None
    if "models" in table and "replicas" in table:
        reader.wrong((*path, "replicas"), "has no effect, since scaling has min and max: remove it")
    if "models" not in table and "warm" in values:
        reader.wrong((*inner, "warm"), "has an effect with models only, whose servers nerite up starts: remove it")
    try:
        return ScalingPolicy(**values), target
    except InvalidArgument as error:
        reader.wrong(inner, error.message)
        return None, None


def _scale_target(
    reader: TableReader, path: KeyPath, actuator: str, target: ScaleTarget | None, source: MemberSource
) -> ScaleTarget | None:
    if not actuator:
        if target is not None:
            reader.wrong((*path, "target"), 'has an effect with actuator = "kubernetes" only: add it')
        return None
    if source.models:
        reader.wrong((*path, "actuator"), "has no effect with models, whose servers nerite up starts: remove it")
    elif target is None and source.kubernetes is None:
        reader.wrong(path, 'has no target: name the workload, as in target = "deployment/nerite"')
    elif target is None and source.kubernetes is not None:
        return ScaleTarget(source.kubernetes.namespace, "deployment", source.kubernetes.service)
    return target


def placement_of(
    reader: TableReader, path: KeyPath, table: Mapping[str, Any], pool: Mapping[str, Any], source: MemberSource
) -> PlacementSettings:
    """Return the settings of a pool whose models the router places on its members."""
    if not isinstance(table, dict):
        reader.read(path, table, {})
        return PlacementSettings()
    reader.refuse_unknown(path, table, (*_PLACEMENT, *_PLACEMENT_POLICY, "models"))
    values = reader.read(path, {key: table[key] for key in _PLACEMENT if key in table}, _PLACEMENT)
    policy = reader.read(path, {key: table[key] for key in _PLACEMENT_POLICY if key in table}, _PLACEMENT_POLICY)
    try:
        values["policy"] = PlacementPolicy(**policy)
    except InvalidArgument as error:
        reader.wrong(path, error.message)
    models = table.get("models", {})
    if not isinstance(models, dict):
        reader.wrong((*path, "models"), 'must have a table for each model, as in resnet = { memory = "2GiB" }')
        models = {}
    values["models"] = {
        name: PlacedModel(**reader.read((*path, "models", name), each, _PLACED_MODEL)) for name, each in models.items()
    }
    if pool["kind"] not in _WITH_REPOSITORY:
        kinds = ", ".join(_WITH_REPOSITORY)
        reader.wrong(path, f"servers of kind {pool['kind']} do not load models on request: it needs one of {kinds}")
    untold = any(not (each.memory or each.metrics) for each in source.members) or bool(
        source.dns or source.kubernetes or source.ray
    )
    if untold and not (values.get("memory") or pool.get("metrics_port")):
        reader.wrong(path, 'it is not known how much memory members have: add memory = "16GiB", or metrics-port')
    if "key" in values:
        values["key"] = reader.key_beside(values["key"])
    return PlacementSettings(**values)


def resources_of(reader: TableReader, path: KeyPath, table: object, source: MemberSource) -> ServerResources:
    """Return what each server of a pool needs of a node."""
    custom = table.get("custom", {}) if isinstance(table, dict) else {}
    if isinstance(table, dict):
        table = {key: value for key, value in table.items() if key != "custom"}
    values = reader.read(path, table, _RESOURCES)
    if not isinstance(custom, dict) or len(custom) > MAX_MEMBERS:
        reader.wrong((*path, "custom"), "must have a number for each resource, as in custom = { spot = 1 }")
        custom = {}
    amounts = {}
    for name, value in custom.items():
        try:
            amounts[name] = read_amount(value)
        except ValueError as error:
            reader.wrong((*path, "custom", name), str(error))
    if not source.models:
        reader.wrong(path, "has an effect with models only, whose servers nerite ray up starts: remove it")
    if values.get("engine_places_gpus") and values.get("gpus"):
        what = "has no effect with engine-places-gpus = true, as the engine asks for GPUs itself: remove one of them"
        reader.wrong((*path, "gpus"), what)
    if values.get("gpus", 0.0) > 1 and not values["gpus"].is_integer():
        reader.wrong((*path, "gpus"), "must be a whole number, or a fraction of one GPU")
    return ServerResources(custom=amounts, **values)


def rollout_of(
    reader: TableReader, path: KeyPath, table: object, kind: ServerKind, source: MemberSource
) -> RolloutSettings | None:
    """Return the rollouts of a pool's models; None if they are not clear."""
    if not isinstance(table, dict):
        reader.read(path, table, {})
        return None
    reader.refuse_unknown(path, table, (*_ROLLOUT, "models"))
    values = reader.read(path, {key: table[key] for key in _ROLLOUT if key in table}, _ROLLOUT)
    models = table.get("models")
    if kind is not ServerKind.NERITE:
        reader.wrong(path, f"servers of kind {kind} have no rollouts: remove it, or use servers of kind nerite")
    if any(flag.startswith("--rollout-state") for flag in source.flags):
        what = "has --rollout-state, where the state of all servers would be the same: remove it, each has its own"
        reader.wrong((*path[:-1], "flags"), what)
    if not isinstance(models, dict) or not models:
        reader.wrong(path, 'must have a table for each model, as in models.resnet = { from = "1", to = "2" }')
        return None
    specs = {}
    for model, document in models.items():
        spec, mistakes = read_spec(document)
        for key, what in mistakes:
            reader.wrong((*path, "models", model, key), what)
        if spec is not None:
            specs[model] = spec
            for where, what in _obstacles(spec, model, source.models):
                reader.wrong((*path, "models", model, *where), what)
    if "unreachable" in values:
        values["unreachable"] = WhenLost(values["unreachable"])
    if "key" in values:
        values["key"] = reader.key_beside(values["key"])
    return RolloutSettings(specs, **values)


def _obstacles(spec: RolloutSpec, model: str, repository: str) -> Iterator[tuple[KeyPath, str]]:
    """Yield what a rollout cannot have on several servers, and what the model repository, if it is here, does not."""
    if not spec.baseline:
        yield ("from",), 'is missing: the same version must be the baseline on all servers, as in from = "1"'
    if spec.shadow:
        yield ("shadow",), "has no effect on several servers: write a [shadow] into route.toml beside the model"
    if all(isinstance(parse_gate(text), LimitGate) for text in spec.gates):
        yield ("gate",), 'has no gate that compares requests: add one, as in "errors" or "p99"'
    models = _folders(repository) if repository else None
    if models is None:
        return
    if model not in models:
        yield (), f"is not in {repository}. There are: {', '.join(models) or 'none'}"
        return
    folder = Path(repository, model)
    if (folder / "rollout.toml").exists():
        yield (), f"{folder / 'rollout.toml'} asks for a rollout of the model, too: remove one of them"
    versions = sorted(filter(str.isdecimal, _folders(str(folder)) or ()), key=int)
    for key, version in (("from", spec.baseline), ("to", spec.to)):
        if version and version not in versions:
            yield (key,), f"version {version} is not in {folder}. There are: {', '.join(versions) or 'none'}"


def _folders(path: str) -> list[str] | None:
    """Return the folders in a folder; None if it is not on this machine, or not to be read."""
    try:
        return sorted(each.name for each in Path(path).iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError:
        return None
