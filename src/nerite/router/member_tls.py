"""TLS of the connections to members: a context for each pool whose members speak it."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Final, NamedTuple

from nerite.balancing.member import Member
from nerite.cluster.addresses import split_address
from nerite.cluster.settings import MemberTls, PoolSettings
from nerite.core.errors import InvalidArgument
from nerite.core.failures import system_error

HTTP: Final = "http/1.1"
GRPC: Final = "h2"


class ClientTls(NamedTuple):
    """What a connection to one member needs."""

    context: ssl.SSLContext
    server_name: str
    """Name that the certificate of the member must have."""


class MemberContexts:
    """The TLS contexts of pools, for one protocol."""

    def __init__(self, pools: Sequence[PoolSettings], protocol: str) -> None:
        """``protocol`` is what is negotiated (ALPN). Raises ``InvalidArgument`` for a file that cannot be used."""
        self._pools = {
            pool.name: (client_context(pool.name, pool.tls, protocol), pool.tls.server_name)
            for pool in pools
            if pool.tls is not None
        }

    def of(self, member: Member, address: str) -> ClientTls | None:
        """Return what a connection to an address of a member needs; None if it is plain."""
        if not member.tls or not address:
            return None
        context, server_name = self._pools[member.tls]
        return ClientTls(context, server_name or split_address(address)[0])


def client_context(pool: str, tls: MemberTls, protocol: str) -> ssl.SSLContext:
    """Return the context of connections to the members of a pool. Raises ``InvalidArgument``. Blocks on file I/O."""
    try:
        context = ssl.create_default_context(cafile=tls.ca or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"pool '{pool}': tls.ca: cannot use '{tls.ca}': {system_error(error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    if tls.certificate:
        try:
            context.load_cert_chain(tls.certificate, tls.key or None)
        except (OSError, ssl.SSLError) as error:
            files = f"'{tls.certificate}'" + (f" with the key '{tls.key}'" if tls.key else "")
            reason = f"tls.certificate: cannot use {files}: {system_error(error)}"
            raise InvalidArgument(f"pool '{pool}': {reason}") from None
    return context


def check_contexts(pools: Sequence[PoolSettings]) -> list[str]:
    """Return the mistakes in the files that pools name for TLS. Blocks on file I/O."""
    mistakes = []
    for pool in pools:
        try:
            MemberContexts([pool], HTTP)
        except InvalidArgument as error:
            mistakes.append(error.message)
    return mistakes


def refusal_of(error: OSError) -> str:
    """Return why a connection could not be opened, as the end of a sentence about the member."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has no certificate that is trusted: {error.verify_message}. Set ca or server-name in tls of its pool"
    if isinstance(error, ssl.SSLError):
        return f"failed the TLS handshake: {error.reason or system_error(error)}"
    return f"cannot be reached: {system_error(error)}"
