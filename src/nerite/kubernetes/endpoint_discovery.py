"""Follows the endpoints of a service for a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nerite.balancing.member import Member
from nerite.cluster.kubernetes_names import ServiceReference
from nerite.cluster.settings import PoolSettings
from nerite.core.errors import NeriteError
from nerite.kubernetes.access import find_access
from nerite.kubernetes.api_client import ApiClient
from nerite.kubernetes.endpoint_slices import members_of_slices
from nerite.kubernetes.object_watch import ObjectWatch
from nerite.observability.log import log


class _ServiceEndpoints:
    """Passes the members of a service on when they have changed."""

    def __init__(self, pool: PoolSettings, service: ServiceReference, take: Callable[[Sequence[Member]], None]) -> None:
        self._pool = pool
        self._service = service
        self._take = take
        self._members: tuple[Member, ...] | None = None
        self._problem = ""

    def changed(self, slices: Mapping[str, Mapping[str, Any]]) -> None:
        pool, service = self._pool, self._service
        members, problem = members_of_slices(slices.values(), service, pool.kind, pool.grpc_port, pool.metrics_port)
        if problem and problem != self._problem:
            log.warning(f"pool '{pool.name}': service {service} {problem}")
        self._problem = problem
        if members != self._members:
            draining = sum(member.drain for member in members)
            ending = f", of which {draining} are terminating" if draining else ""
            log.info(f"pool '{pool.name}': service {service} has {len(members)} members{ending}")
            self._take(members)
            self._members = members  # only now, or members that could not be taken would not be tried again


async def watch_endpoints(
    pool: PoolSettings, service: ServiceReference, take: Callable[[Sequence[Member]], None]
) -> ObjectWatch:
    """Find the members of a pool for the first time; return the watch whose ``run`` goes on finding them.

    ``take`` is called with all members when they have changed. While the API server cannot be reached, the pool keeps
    the last ones, or has none. Raises ``NeriteError`` if there is no access to an API server.
    """
    access = await asyncio.to_thread(find_access)
    namespace = service.namespace or access.namespace
    path, older = (f"/apis/discovery.k8s.io/{v}/namespaces/{namespace}/endpointslices" for v in ("v1", "v1beta1"))
    endpoints = _ServiceEndpoints(pool, service, take)
    selector = f"kubernetes.io/service-name={service.service}"
    watch = ObjectWatch(ApiClient(access), path, selector, endpoints.changed, older)
    try:
        await watch.list()
    except NeriteError as error:
        log.warning(f"pool '{pool.name}': {error.message}. It has no members until that succeeds")
    return watch
