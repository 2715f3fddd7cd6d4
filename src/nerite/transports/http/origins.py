"""Refuses what a browser sends on behalf of a web page that has no business with this server.

A browser sends requests for any page it shows, with the rights of the machine that it runs on: to 127.0.0.1, and into
an inner network. Without CORS the page cannot read the answer, but a request that changes something needs none
(cross-site request forgery). A page whose own name is made to point at this server (DNS rebinding) can read answers,
too: all that gives it away is the ``Host`` that it uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Final

from nerite.config.options import HttpOptions, is_loopback
from nerite.core.errors import Forbidden
from nerite.core.text import quoted_text
from nerite.llm.openai.api import PREFIX
from nerite.llm.openai.fields import reply_of
from nerite.transports.http import reply, routes
from nerite.transports.http.head import RequestHead, header_bytes_of
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.reply import Reply

# CORS: which pages of other origins may use the HTTP port. Browsers ask, and obey; nobody else needs to.
#
# What a reply says about it follows from the head of its request, so it is worked out once for each distinct head.

ANY: Final = "*"
_OWN_HEADERS: Final = ("Content-Type", "Content-Encoding", "Inference-Header-Content-Length")
_EXPOSED: Final = b"Access-Control-Expose-Headers: Inference-Header-Content-Length, Content-Encoding, Retry-After"
_VARY: Final = b"Vary: Origin"
_REMEMBER_SECONDS: Final = 7200
"""For which a browser need not ask again. More than that none remembers."""
_name = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch


class Cors:
    """The rules: origins that are allowed, and what their pages may send."""

    def __init__(self, origins: Collection[str], key_headers: Iterable[str]) -> None:
        """``key_headers`` are those that restricted endpoints expect."""
        self._origins = frozenset(origins)
        self._any = ANY in origins
        self._headers = tuple(dict.fromkeys((*_OWN_HEADERS, *key_headers)))

    def lines(self, head: RequestHead) -> bytes:
        """Return the header lines of every reply to ``head``, without a line end behind them; empty for none."""
        if self._allowed(head):
            if self._any:
                return b"Access-Control-Allow-Origin: *\r\n" + _EXPOSED
            origin = header_bytes_of(head.headers["origin"])
            return b"\r\n".join((b"Access-Control-Allow-Origin: " + origin, _EXPOSED, _VARY))
        # What a cache keeps for one origin is not the answer for another.
        return _VARY if head.method == "GET" and not self._any else b""

    def preflight(self, head: RequestHead, methods: Iterable[str]) -> Reply | None:
        """Return the answer to the question whether a page may ask what it has in mind, None if ``head`` is none."""
        if head.method != "OPTIONS" or "access-control-request-method" not in head.headers or not self._allowed(head):
            return None
        # Whatever else it wants to send may pass, too: headers are for those who read them to judge.
        wanted = map(str.strip, head.headers.get("access-control-request-headers", "").split(","))
        known = {name.lower() for name in self._headers}
        names = [*self._headers, *(name for name in wanted if _name(name) and name.lower() not in known)]
        lines = (
            f"Access-Control-Allow-Methods: {', '.join(methods)}",
            f"Access-Control-Allow-Headers: {', '.join(names)}",
            f"Access-Control-Max-Age: {_REMEMBER_SECONDS}",
        )
        return Reply(204, headers="".join(f"{line}\r\n" for line in lines).encode("latin-1"))

    def _allowed(self, head: RequestHead) -> bool:
        origin = head.headers.get("origin")
        return origin is not None and (self._any or origin in self._origins)


class CorsRouter:
    """Answers what browsers ask beforehand, leaves everything else to another router, and says who may read it."""

    def __init__(self, cors: Cors, target_of: Callable[[RequestHead], HttpTarget]) -> None:
        self._cors = cors
        self._target_of = target_of

    def target(self, head: RequestHead) -> HttpTarget:
        """Return what a head asks for."""
        head.reply_lines = self._cors.lines(head)
        head.special = head.special or bool(head.reply_lines)
        route = routes.find_route(head.path)
        # Before any key: browsers do not send it along.
        preflight = self._cors.preflight(head, route.endpoint.methods) if route is not None else None
        return self._target_of(head) if preflight is None else HttpTarget(preflight)


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
        if self._hosts is not None and not self._is_own(_browser_guard_name(host)):
            name = quoted_text(_browser_guard_name(host))
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
        page = "of another site" if origin in (None, "null") else f"of '{quoted_text(str(origin))}'"
        remedy = ANY if origin in (None, "null") else quoted_text(str(origin))
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

    def __init__(self, guard: BrowserGuard, target_of: Callable[[RequestHead], HttpTarget]) -> None:
        self._guard = guard
        self._target_of = target_of

    def target(self, head: RequestHead) -> HttpTarget:
        """Return what a head asks for."""
        try:
            self._guard.check(head)
        except Forbidden as error:
            return HttpTarget(refusal=reply_of(error) if head.path.startswith(PREFIX) else reply.error_reply(error))
        return self._target_of(head)


def _browser_guard_name(host: str) -> str:
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
