"""Values of the Helm chart that stand for a cluster file. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from nerite.cluster.settings import ClusterSettings, PoolSettings
from nerite.core.errors import InvalidArgument
from nerite.redis.settings import settings_of_address

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?")
_OF_CHART: Final = ("address", "http-port", "grpc-port", "metrics-port", "exit-timeout", "policy-file")
"""Keys of [router] that the chart writes itself."""
_OF_POOL: Final = ("name", "models", "replicas", "flags", "resources")
"""Keys of [[pool]] that become other values."""
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")
_DATABASES: Final = ("ledger", "batches")
_FILES: Final = ("tls", "member-key-file", "batch-files")
"""Keys of [router] that name files and folders."""
_BLOCK: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?\n(?:(?:[ -~]*[!-~])?\n)*(?:[ -~]*[!-~])\n")
"""Text that stands in YAML as it is: several lines without blanks at their ends."""
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


class PodOptions(NamedTuple):
    """What the cluster file does not say of the pods, by pool; under the empty name: of all others."""

    image: str = ""
    claims: Mapping[str, str] = {}
    """Persistent volume claims with the models."""
    gpus: Mapping[str, int] = {}
    redis: str = ""
    """URL of the Redis of the cluster, instead of the one in the file."""
    scaled_by: str = "keda"
    """Who follows [pool.scaling]: keda, or the router."""


def chart_values(settings: ClusterSettings, raw: Mapping[str, Any], policy: str, options: PodOptions) -> dict[str, Any]:
    """Return the values. ``raw`` is the file as TOML, ``policy`` the text of its policy file.

    Raises ``InvalidArgument`` for what has no meaning in a cluster, with the remedy.
    """
    file = settings.path
    known = {pool.name for pool in settings.pools if pool.source.models}
    for name in {*options.claims, *options.gpus} - known - {""}:
        raise InvalidArgument(
            f"{file}: there is no pool '{name}' with models, but {', '.join(sorted(known)) or 'none'}"
        )
    pools, others = [], []
    for pool, table in zip(settings.pools, raw["pool"], strict=True):
        _check_files(pool, file)
        if pool.source.models:
            pools.append(_pool(pool, table, file, options))
        else:
            others.append(_other_pool(pool, table, file))
    if not pools:
        raise InvalidArgument(f"{file}: no pool has models, so the chart would have nothing to serve: write models = …")
    router = raw.get("router", {})
    for key in _DATABASES:
        if key in router and "://" not in router[key]:
            raise InvalidArgument(
                f"{file}: router.{key} is a file, and routers share no file system: write a URL, as in postgresql://…"
            )
    in_file = ["admin-key"] if "=@" in router.get("admin-key", "") else []
    for key in (*_FILES, *in_file):
        if key in router:
            what = "batches and batch-files" if key == "batch-files" else "it"
            raise InvalidArgument(f"{file}: router.{key} names files, which pods of routers do not have: remove {what}")
    if options.redis:
        router = {**router, "redis": options.redis}
    elif settings.router.redis and settings_of_address(settings.router.redis).host in _LOCAL:
        raise InvalidArgument(
            f"{file}: router.redis is on this machine: name the Redis of the cluster, as in --redis redis://redis:6379"
        )
    values: dict[str, Any] = {"image": {"imageName": options.image}} if options.image else {}
    values["router"] = {
        "enabled": True,
        "exitSeconds": max(1, round(settings.router.exit_timeout)),
        "toml": toml_of({key: value for key, value in router.items() if key not in _OF_CHART}),
    }
    if policy:
        values["router"]["policy"] = policy
    if others:
        values["router"]["otherPools"] = "\n".join(f"[[pool]]\n{toml_of(table)}" for table in others)
    if any("autoscaling" in pool for pool in pools):
        values["router"]["replicaCount"] = 1  # it decides by all requests, and sees only its own
    values["pools"] = pools
    return values


def _pool(pool: PoolSettings, table: Mapping[str, Any], file: str, options: PodOptions) -> dict[str, Any]:
    name = pool.name
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{file}: pool '{name}' has a name that Kubernetes does not allow: 1 to 22 lower-case letters, digits and -"
        )
    values: dict[str, Any] = {"name": name, "replicaCount": pool.source.replicas}
    claim = options.claims.get(name, options.claims.get("", ""))
    if "://" in table["models"]:
        values["repository"] = table["models"]
    elif claim:
        values |= {"repository": "/models", "modelVolume": {"persistentVolumeClaim": {"claimName": claim}}}
    else:
        raise InvalidArgument(
            f"{file}: pool '{name}' has its models in '{table['models']}' on this machine: copy them into "
            f'a volume and name its claim, as in --claim {name}=CLAIM, or write a URL, as in models = "s3://…"'
        )
    baselines = pool.rollout.server_flags if pool.rollout is not None else ()
    if flags := [*baselines, *pool.source.flags]:
        values["serverArgs"] = flags
    values |= _resources(pool, file, options.gpus.get(name, options.gpus.get("")))
    kept = {key: value for key, value in table.items() if key not in _OF_POOL}
    if pool.scaling is not None:
        values["autoscaling"] = {
            "enabled": True,
            "by": options.scaled_by,
            "minReplicas": pool.scaling.least,
            "maxReplicas": pool.scaling.most,
        }
        kept["scaling"] = {key: value for key, value in table["scaling"].items() if key != "warm"}
        if options.scaled_by == "router":
            kept["scaling"]["actuator"] = "kubernetes"
    values["toml"] = toml_of(kept)
    return values


def _resources(pool: PoolSettings, file: str, gpus: int | None) -> dict[str, Any]:
    """Return what each server gets: GPUs as the command line says, or else as the pool's table does."""
    asked = pool.resources
    values: dict[str, Any] = {"numGpus": gpus} if gpus else {}
    if asked is None:
        return values
    if gpus is None and asked.engine_places_gpus:
        raise InvalidArgument(
            f"{file}: pool '{pool.name}' has engine-places-gpus, which needs Ray: say how many GPUs each server has, "
            f"as in --gpus {pool.name}=8"
        )
    if gpus is None and not asked.gpus.is_integer():
        raise InvalidArgument(
            f"{file}: pool '{pool.name}' has {asked.gpus:g} GPUs, and Kubernetes gives whole ones: write gpus = 1, or "
            f"say how many, as in --gpus {pool.name}=1"
        )
    if gpus is None and asked.gpus:
        values["numGpus"] = int(asked.gpus)
    requests = {"cpu": f"{asked.cpus:g}"}
    values["resources"] = {"requests": requests}
    if asked.memory:
        requests["memory"] = str(asked.memory)
        values["resources"]["limits"] = {"memory": str(asked.memory)}
    return values


def _check_files(pool: PoolSettings, file: str) -> None:
    """Refuse files besides those of models. Raises ``InvalidArgument``."""
    tls = pool.tls
    if tls is not None and (tls.ca or tls.certificate):
        raise InvalidArgument(f"{file}: tls of pool '{pool.name}' names files, which pods of routers do not have")
    for table, asked in (("placement", pool.placement), ("rollout", pool.rollout)):
        if asked is not None and "=@" in asked.key:
            raise InvalidArgument(
                f"{file}: key in {table} of pool '{pool.name}' names a file, which pods of routers do not have"
            )


def _other_pool(pool: PoolSettings, table: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    if pool.source.file:
        raise InvalidArgument(
            f"{file}: pool '{pool.name}' has a members file, which pods do not have: write members, dns or kubernetes"
        )
    return table


def toml_of(table: Mapping[str, Any]) -> str:
    """Return a table as TOML, a key a line; tables in it stand in braces."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items())


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _value(value: object) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value) if isinstance(value, str | bool) else str(value)


def yaml_of(value: object, indent: str = "") -> str:
    """Return values as YAML: texts of several lines as blocks, everything else as JSON has it."""
    return "".join(f"{line}\n" for line in _yaml(value, indent))


def _yaml(value: object, indent: str) -> Iterator[str]:
    pairs: Iterator[tuple[str, object]]
    if isinstance(value, dict):
        pairs = ((f"{key}:", each) for key, each in value.items())
    elif isinstance(value, list):
        pairs = (("-", each) for each in value)
    else:
        yield f"{indent}{json.dumps(value)}"
        return
    for begin, each in pairs:
        if isinstance(each, str) and _BLOCK.fullmatch(each):
            yield f"{indent}{begin} |"
            yield from (f"{indent}  {line}" if line else "" for line in each.splitlines())
        elif isinstance(each, dict | list) and each and begin != "-":
            yield f"{indent}{begin}"
            yield from _yaml(each, f"{indent}  ")
        elif isinstance(each, dict) and each:
            first, *rest = _yaml(each, f"{indent}  ")
            yield f"{indent}- {first[len(indent) + 2 :]}"
            yield from rest
        else:
            yield f"{indent}{begin} {json.dumps(each)}"
