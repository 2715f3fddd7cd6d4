"""Protection against requests that browsers send on behalf of web pages of other origins.

A browser sends requests for any page it shows, with the network access of its machine: to 127.0.0.1, and into an
internal network. Without CORS the page cannot read the reply, but a request that changes something needs no reply
(cross-site request forgery). A page whose own name is made to resolve to this server (DNS rebinding) can also read
replies; only the ``Host`` that it uses gives it away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final

from nerite.config.open_ports import is_loopback
from nerite.core.errors import Forbidden
from nerite.core.text import quoted_text
from nerite.llm.openai.errors import reply_for
from nerite.transports.http import reply, routes
from nerite.transports.http.head import RequestHead, header_bytes_of
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.reply import Reply

if TYPE_CHECKING:
    from nerite.config.options import HttpOptions

# CORS: which pages of other origins may use the HTTP port. Only browsers ask and obey; other clients are unaffected.
#
# The CORS headers of a reply depend only on the head of its request, so they are computed once for each distinct head.

ANY: Final = "*"
_OWN_HEADERS: Final = ("Content-Type", "Content-Encoding", "Inference-Header-Content-Length")
_EXPOSED: Final = b"Access-Control-Expose-Headers: Inference-Header-Content-Length, Content-Encoding, Retry-After"
_VARY: Final = b"Vary: Origin"
_REMEMBER_SECONDS: Final = 7200
"""How long a browser may cache a preflight reply. No browser caches it longer."""
_is_token = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch


class Cors:
    """CORS rules: the allowed origins, and what their pages may send."""

    def __init__(self, origins: Collection[str], key_headers: Iterable[str]) -> None:
        """``key_headers`` are the headers that restricted endpoints expect."""
        self._origins = frozenset(origins)
        self._any = ANY in origins
        self._headers = tuple(dict.fromkeys((*_OWN_HEADERS, *key_headers)))

    def lines(self, head: RequestHead) -> bytes:
        """Return the CORS lines of every reply to ``head``, without a trailing line end; empty for none."""
        if self._allowed(head):
            if self._any:
                return b"Access-Control-Allow-Origin: *\r\n" + _EXPOSED
            origin = header_bytes_of(head.headers["origin"])
            return b"\r\n".join((b"Access-Control-Allow-Origin: " + origin, _EXPOSED, _VARY))
        # A cache must not serve the reply for one origin to another.
        return _VARY if head.method == "GET" and not self._any else b""

    def preflight(self, head: RequestHead, methods: Iterable[str]) -> Reply | None:
        """Return the reply to a preflight request; None if ``head`` is not an allowed preflight request."""
        if head.method != "OPTIONS" or "access-control-request-method" not in head.headers or not self._allowed(head):
            return None
        # Any other header is allowed, too: the code that reads a header decides about it.
        wanted = map(str.strip, head.headers.get("access-control-request-headers", "").split(","))
        known = {name.lower() for name in self._headers}
        names = [*self._headers, *(name for name in wanted if _is_token(name) and name.lower() not in known)]
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
    """Router that answers CORS preflight requests, and adds CORS headers to the replies of another router."""

    def __init__(self, cors: Cors, target_of: Callable[[RequestHead], HttpTarget]) -> None:
        self._cors = cors
        self._target_of = target_of

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a head."""
        head.reply_lines = self._cors.lines(head)
        head.special = head.special or bool(head.reply_lines)
        route = routes.find_route(head.path)
        # Before any key check: browsers do not send keys with preflight requests.
        preflight = self._cors.preflight(head, route.endpoint.methods) if route is not None else None
        return self._target_of(head) if preflight is None else HttpTarget(preflight)


_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_OWN_SITE: Final = ("same-origin", "none")
"""Values of ``Sec-Fetch-Site`` for the server's own pages, and for addresses typed by the user."""
_USUAL_PORTS: Final = {"http": ":80", "https": ":443"}
_HOST: Final = re.compile(r"(?:\[[0-9a-f:.]+\]|(?P<name>[a-z0-9_.-]*?)\.?)(?::[0-9]{0,5})?").fullmatch
"""A host as ``Host`` has it, in lower case: an IPv6 address in brackets or a name, then maybe a port."""


class BrowserGuard:
    """Rules of one port: which pages may send requests that change something, and which host names are accepted."""

    def __init__(
        self,
        origins: Collection[str],
        hosts: Collection[str] | None,
        host_remedy: str = "start the server with --http-allowed-host={}",
        origin_remedy: str = "To let pages of that origin use this server, start it with --http-cors-origin={}",
    ) -> None:
        """Pages of ``origins`` may send any request. ``hosts`` None: any host name is accepted.

        The remedies are what a refusal tells to do, with a placeholder for what was refused.
        """
        self._host_remedy = host_remedy
        self._origin_remedy = origin_remedy
        self._origins = frozenset(origins)
        self._hosts = None if hosts is None or ANY in hosts else frozenset(hosts)

    @classmethod
    def of(cls, options: HttpOptions, address: str) -> BrowserGuard:
        """Return the guard of a port at ``address``.

        Host names are checked if only this machine can reach the port, as all clients then use a name of this machine,
        and if the flag lists the allowed names.
        """
        checks_names = bool(options.allowed_hosts) or is_loopback(address)
        return cls(options.cors_origins, options.allowed_hosts if checks_names else None)

    def check(self, head: RequestHead) -> None:
        """Raise ``Forbidden`` if a request must not be answered."""
        host = head.headers.get("host", "").lower()
        parts = _HOST(host)
        if parts is None:
            raise Forbidden(f"header 'Host' is no host name or address with an optional port: '{quoted_text(host)}'")
        if self._hosts is not None and not self._is_own(parts):
            name = quoted_text(parts["name"])
            raise Forbidden(
                f"'{name}' is not an accepted host name of this server: a web page may have sent the request by DNS "
                f"rebinding. Use localhost or an IP address, or {self._host_remedy.format(name)}"
            )
        if head.method in _SAFE or ANY in self._origins:
            return
        origin = head.headers.get("origin")
        if origin in self._origins or _is_own_page(origin, head.headers.get("sec-fetch-site"), host):
            return
        page = "of another site" if origin in (None, "null") else f"of '{quoted_text(str(origin))}'"
        remedy = ANY if origin in (None, "null") else quoted_text(str(origin))
        raise Forbidden(
            f"a web page {page} may not send {head.method} requests to this server (cross-site request forgery "
            f"protection). {self._origin_remedy.format(remedy)}"
        )

    def _is_own(self, host: re.Match[str]) -> bool:
        """Return whether a host is accepted: an address, an allowed name, or one that no web page can have."""
        assert self._hosts is not None
        name = host["name"] or ""
        if not name or name.rpartition(".")[2].isdecimal():  # an IP address, or nothing
            return True
        return name == "localhost" or name.endswith(".localhost") or name in self._hosts


class GuardedRouter:
    """Router that checks each distinct head with a ``BrowserGuard`` before another router."""

    def __init__(self, guard: BrowserGuard, target_of: Callable[[RequestHead], HttpTarget]) -> None:
        self._guard = guard
        self._target_of = target_of

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a head."""
        try:
            self._guard.check(head)
        except Forbidden as error:
            openai = routes.is_openai(head.path)
            return HttpTarget(refusal=reply_for(head.path)(error) if openai else reply.error_reply(error))
        return self._target_of(head)


def _is_own_page(origin: str | None, site: str | None, host: str) -> bool:
    """Return whether a request is from a page of this server, or not from a page at all.

    ``Sec-Fetch-Site`` takes precedence over the origin, which differs from the host behind a proxy.
    """
    if site is not None:
        return site in _OWN_SITE
    if origin is None:
        return True
    scheme, _, there = origin.lower().partition("://")
    usual = _USUAL_PORTS.get(scheme, "")
    return there.removesuffix(usual) == host.removesuffix(usual)
