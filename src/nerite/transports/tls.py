"""TLS for a port: certificates and what is negotiated."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from nerite.config.options import TlsOptions
from nerite.core.errors import InvalidArgument


def context_of(options: TlsOptions, protocols: Sequence[str]) -> ssl.SSLContext | None:
    """Return the context of a port that speaks ``protocols``, None where TLS is off.

    Raises ``InvalidArgument`` for a file that cannot be read or is no certificate or key.
    """
    if not options.enabled:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(protocols))
    file = options.server_cert
    try:
        context.load_cert_chain(options.server_cert, options.server_key or None)
        if options.mutual:
            file = options.root_cert
            context.load_verify_locations(options.root_cert)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"cannot use the certificate '{file}': {error}") from error
    return context
