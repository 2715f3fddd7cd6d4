"""Models with instance groups that need resources, devices or processor cores."""

from __future__ import annotations

from conformance.repositories import Files, python


def instances(*groups: str) -> Files:
    """Return a model with these instance groups, all on the processor."""
    described = ", ".join(f"{{ kind: KIND_CPU {group} }}" for group in groups)
    return python("waits", "MILLISECONDS INT32 1", "TURN INT32 3", f"instance_group [ {described} ]")


def needing(*resources: str, priority: int = 1, count: int = 1, more: str = "") -> Files:
    """Return a model whose instances need ``resources``, such as ``"room" count: 1``."""
    needed = ", ".join(f"{{ name: {each} }}" for each in resources)
    return instances(f"count: {count} {more} rate_limiter {{ resources [ {needed} ] priority: {priority} }}")


MODELS = {
    "both": needing('"door" count: 1', '"door" count: 1 global: true', priority=0),
    "elsewhere": needing('"yard" count: 1'),
    "everywhere": needing('"room" count: 1 global: true'),
    "free": needing(priority=100),
    "idle": needing('"room" count: 9', more="passive: true"),
    "large": needing('"room" count: 3'),
    "nocores": instances('count: 1 host_policy: "nocores"'),
    "nonode": instances('count: 1 host_policy: "nonode"'),
    "norange": instances('count: 1 host_policy: "norange"'),
    "nowhere": needing('"cellar" count: 1'),
    "often": needing('"room" count: 1'),
    "partly": instances("count: 1 passive: true", 'name: "active" count: 1'),
    "pinned": instances('count: 1 host_policy: "first"'),
    "seldom": needing('"room" count: 1', priority=5),
    "several": needing('"door" count: 1 global: true', count=2),
    "unpinned": instances('count: 1 host_policy: "unknown"'),
}
