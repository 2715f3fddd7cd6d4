"""Refuses what a browser sends on behalf of a web page that has no business with this server.

A browser sends requests for any page it shows, with the rights of the machine that it runs on: to 127.0.0.1, and into
an inner network. Without CORS the page cannot read the answer, but a request that changes something needs none
(cross-site request forgery). A page whose own name is made to point at this server (DNS rebinding) can read answers,
too: all that gives it away is the ``Host`` that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from nerite.config.exposure import is_loopback
from nerite.config.options import HttpOptions
from nerite.core.errors import Forbidden
from nerite.core.text import shown
from nerite.transports.http import reply
from nerite.transports.http.cors import ANY
from nerite.transports.http.head import RequestHead
from nerite.transports.http.target import Target
from nerite.transports.openai.api import PREFIX
from nerite.transports.openai.errors import reply_of

_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_OWN_SITE: Final = ("same-origin", "none")
"""Values of ``Sec-Fetch-Site`` of the server's own pages, and of what a person has typed."""
_USUAL_PORTS: Final = {"http": ":80", "https": ":443"}


class BrowserGuard:
    """The rules of one port: which pages may send something, and which names of the server are accepted."""

    def __init__(self, origins: Collection[str], hosts: Collection[str] | None) -> None:
        """``origins`` are those whose pages may do as they like. ``hosts`` None: the server has any name."""
        self._origins = frozenset(origins)
        self._hosts = None if hosts is None or ANY in hosts else frozenset(hosts)

    @classmethod
    def of(cls, options: HttpOptions, address: str) -> BrowserGuard:
        """Return the guard of a port at ``address``.

        Names count where only this machine can reach the port, since every client knows it by a name of this machine,
        and where the flag says which names there are.
        """
        checks_names = bool(options.allowed_hosts) or is_loopback(address)
        return cls(options.cors_origins, options.allowed_hosts if checks_names else None)

    def check(self, head: RequestHead) -> None:
        """Raise ``Forbidden`` for a request that is not to be answered."""
        host = head.headers.get("host", "").lower()
        if self._hosts is not None and not self._is_own(_name(host)):
            name = shown(_name(host))
            raise Forbidden(
                f"this server is not called '{name}': a web page may have given it that name to get at it (DNS "
                "rebinding). Use localhost or an IP address, or start the server with "
                f"--http-allowed-host={name}"
            )
        if head.method in _SAFE or ANY in self._origins:
            return
        origin = head.headers.get("origin")
        if origin in self._origins or _is_own_page(origin, head.headers.get("sec-fetch-site"), host):
            return
        page = "of another site" if origin in (None, "null") else f"of '{shown(str(origin))}'"
        remedy = ANY if origin in (None, "null") else shown(str(origin))
        raise Forbidden(
            f"a web page {page} may not send {head.method} requests to this server, as any page can have a browser "
            "send them. To let pages of that origin use this server, start it with "
            f"--http-cors-origin={remedy}"
        )

    def _is_own(self, name: str) -> bool:
        """Return whether the server may be called so: no web page has one of these names."""
        assert self._hosts is not None
        if not name or ":" in name or name.rpartition(".")[2].isdecimal():  # none, or an IP address
            return True
        return name == "localhost" or name.endswith(".localhost") or name in self._hosts


class GuardedRouter:
    """Asks the guard about each distinct head before another router."""

    def __init__(self, guard: BrowserGuard, target_of: Callable[[RequestHead], Target]) -> None:
        self._guard = guard
        self._target_of = target_of

    def target(self, head: RequestHead) -> Target:
        """Return what a head asks for."""
        try:
            self._guard.check(head)
        except Forbidden as error:
            return Target(refusal=reply_of(error) if head.path.startswith(PREFIX) else reply.error_reply(error))
        return self._target_of(head)


def _name(host: str) -> str:
    """Return the name in a ``Host``, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_own_page(origin: str | None, site: str | None, host: str) -> bool:
    """Return whether a request is from a page of this server, or from no page at all.

    What the browser says of the site counts before the origin, which a proxy in front makes another than the host.
    """
    if site is not None:
        return site in _OWN_SITE
    if origin is None:
        return True
    scheme, _, there = origin.lower().partition("://")
    usual = _USUAL_PORTS.get(scheme, "")
    return there.removesuffix(usual) == host.removesuffix(usual)
