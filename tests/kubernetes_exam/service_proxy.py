"""A kube-proxy: addresses of Services lead to their ready endpoints, by rules of nftables as in its mode of that name.

A new connection goes to an endpoint at random. One that is there stays with its endpoint, whatever becomes of that.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from control_plane import BUILT, Api, ApiError

_NFT = BUILT / "packages" / "usr" / "sbin" / "nft"
_LIBRARIES = BUILT / "packages" / "usr" / "lib" / "x86_64-linux-gnu"
_TABLE = """
table ip services
delete table ip services
table ip services {{
{chains}
  chain lead {{
{rules}
  }}
  chain prerouting {{
    type nat hook prerouting priority dstnat
    jump lead
  }}
  chain output {{
    type nat hook output priority -100
    jump lead
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat
    ip saddr 10.213.0.0/16 ct status dnat masquerade
  }}
  chain refuse {{
    type filter hook output priority filter
{refused}
  }}
}}
"""


def load_rules(rules: str) -> None:
    """Load rules into the kernel, in one step."""
    done = subprocess.run(
        [str(_NFT), "-f", "-"],
        input=rules,
        env={**os.environ, "LD_LIBRARY_PATH": str(_LIBRARIES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{rules}"


class ServiceProxy:
    """Follows Services and their Endpoints."""

    def __init__(self, api: Api) -> None:
        self.changes = 0
        """How often rules were loaded."""
        self.problem = ""
        self._api = api
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._services: dict[str, dict[str, Any]] = {}
        self._endpoints: dict[str, dict[str, Any]] = {}
        self._loaded = ""
        for path, objects in (("services", self._services), ("endpoints", self._endpoints)):
            threading.Thread(target=self._follow, args=(f"/api/v1/{path}", objects), daemon=True).start()

    def stop(self) -> None:
        """Change nothing more."""
        self._over.set()

    def ready(self, service: str, namespace: str = "default") -> list[str]:
        """Return the addresses of the ready endpoints of a service."""
        found = self._endpoints.get(f"{namespace}/{service}", {})
        return [each["ip"] for part in found.get("subsets") or () for each in part.get("addresses") or ()]

    def _follow(self, path: str, objects: dict[str, dict[str, Any]]) -> None:
        while not self._over.is_set():
            with suppress(OSError, ApiError, http.client.HTTPException, ValueError):
                for kind, found in self._api.follow(path):
                    if self._over.is_set():
                        return
                    key = f"{found['metadata']['namespace']}/{found['metadata']['name']}"
                    with self._lock:
                        if kind == "DELETED":
                            objects.pop(key, None)
                        else:
                            objects[key] = found
                        self._load()

    def _load(self) -> None:
        rules: list[str] = []
        refused: list[str] = []
        chains: dict[str, str] = {}
        for key, service in self._services.items():
            address = service["spec"].get("clusterIP")
            if address in (None, "", "None"):
                continue
            for port in service["spec"].get("ports", ()):
                target = f"ip daddr {address} tcp dport {port['port']}"
                places = sorted(_places(self._endpoints.get(key, {}), port.get("name")))
                if places:
                    names = [f"to_{place.replace('.', '_').replace(':', '_')}" for place in places]
                    for name, place in zip(names, places, strict=True):
                        chains[name] = f"  chain {name} {{\n    meta l4proto tcp dnat to {place}\n  }}"
                    among = ", ".join(f"{number} : goto {name}" for number, name in enumerate(names))
                    rules.append(f"    {target} numgen random mod {len(places)} vmap {{ {among} }}")
                else:
                    refused.append(f"    {target} reject with tcp reset")
        texts = {"chains": chains.values(), "rules": rules, "refused": refused}
        whole = _TABLE.format(**{name: "\n".join(lines) for name, lines in texts.items()})
        if whole != self._loaded:
            try:
                load_rules(whole)
            except AssertionError as error:
                self.problem = str(error)
                raise
            self._loaded = whole
            self.changes += 1


def _places(endpoints: dict[str, Any], port_name: str | None) -> Iterator[str]:
    for part in endpoints.get("subsets") or ():
        for port in part.get("ports") or ():
            if port.get("name") == port_name:
                for each in part.get("addresses") or ():
                    yield f"{each['ip']}:{port['port']}"
