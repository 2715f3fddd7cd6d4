"""Addresses of members: ``HOST:PORT`` as text, tables in the cluster file, and lines of a members file."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from nerite.balancing.member import Member, ServerKind
from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument
from nerite.core.sizes import size_of

MAX_MEMBERS: Final = 4096
"""Members of a pool."""
_HOST: Final = re.compile(r"(?!-)(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_NAME: Final = re.compile(r"[A-Za-z0-9._:\[\]/@-]{1,253}")
_KEYS: Final = ("http", "grpc", "metrics", "name", "capacity", "memory", "drain")
_EXAMPLE: Final = "10.0.0.2:8000"
_LARGEST_CAPACITY: Final = 1e6


def split_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; brackets enclose an IPv6 address. Raises ``ValueError`` with what it must be."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ValueError(f"must be HOST:PORT, as in {_EXAMPLE}, not '{text[:80]}'")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError:
            raise ValueError(f"has no IPv6 address between its brackets: '{text[:80]}'") from None
    elif not _HOST.fullmatch(host):
        raise ValueError(f"must be HOST:PORT, as in {_EXAMPLE}, or [IPV6]:PORT, not '{text[:80]}'")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT`` that ``split_address`` splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def member_of(given: object, kind: ServerKind, grpc_port: int = 0, metrics_port: int = 0) -> Member:
    """Return the member that a text or a table describes.

    ``grpc_port`` and ``metrics_port`` are those of a member without addresses for them. Raises ``ValueError`` with what
    it must be.
    """
    table: Mapping[str, Any] = {"http": given} if isinstance(given, str) else given if isinstance(given, dict) else {}
    if not table:
        raise ValueError(f'must be "HOST:PORT" or a table, as in {{ http = "{_EXAMPLE}", capacity = 2.0 }}')
    for key in table:
        if key not in _KEYS:
            meant = nearest(key, _KEYS)
            raise ValueError(f"has an unknown key '{key}'. " + (f"Did you mean {meant}?" if meant else _known()))
    http = table.get("http", "")
    if not isinstance(http, str) or not http:
        raise ValueError(f'has no http: write the address of its HTTP port, as in http = "{_EXAMPLE}"')
    host, _ = split_address(http)
    others = []
    for key, port in (("grpc", grpc_port), ("metrics", metrics_port)):
        address = table.get(key, join_address(host, port) if port else "")
        if not isinstance(address, str):
            raise ValueError(f"{key} must be HOST:PORT")
        if key in table:
            split_address(address)
        others.append(address)
    grpc, metrics = others
    try:
        memory = size_of(table.get("memory", 0))
    except ValueError as error:
        raise ValueError(f"memory {error}") from None
    name = table.get("name", http)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("name must be 1 to 253 letters, digits or ._:-/@[]")
    drain = _drain(table.get("drain", False))
    return Member(name, http, grpc, kind, _capacity(table.get("capacity", 1.0)), memory, metrics, drain=drain)


def _capacity(value: object) -> float:
    try:
        capacity = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        capacity = math.nan
    if not 0 < capacity <= _LARGEST_CAPACITY:
        raise ValueError("capacity must be a number greater than 0, as in capacity = 2.0")
    return capacity


def _drain(value: object) -> bool:
    if value is True or value == "true":
        return True
    if value is False or value == "false":
        return False
    raise ValueError("drain must be true or false")


def _known() -> str:
    return f"There are: {', '.join(_KEYS)}"


def members_of_text(
    text: str, file: str, kind: ServerKind, grpc_port: int = 0, metrics_port: int = 0
) -> tuple[Member, ...]:
    """Return the members in a members file. Raises ``InvalidArgument`` with the line of the first mistake.

    A line has an address, and after it any of ``grpc=HOST:PORT``, ``metrics=HOST:PORT``, ``name=NAME``,
    ``capacity=NUMBER``, ``memory=SIZE``, ``drain=true``. Empty lines, and what follows ``#``, are ignored.
    """
    found: dict[str, Member] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            pairs = [word.partition("=") for word in words[1:]]
            if wrong := [key for key, equals, _ in pairs if not equals]:
                raise ValueError(f"has '{wrong[0]}' behind the address: write KEY=VALUE, as in capacity=2.0")
            table = {"http": words[0], **{key: value for key, _, value in pairs}}
            member = member_of(table, kind, grpc_port, metrics_port)
            if member.name in found:
                raise ValueError(f"names member '{member.name}' a second time: remove one of the lines")
        except ValueError as error:
            raise InvalidArgument(f"{file}:{number}: the line {error}") from None
        found[member.name] = member
        if len(found) > MAX_MEMBERS:
            raise InvalidArgument(f"{file}:{number}: a pool has at most {MAX_MEMBERS} members")
    return tuple(found.values())
