"""Whether the machine we are on has an identity of its own in a cloud: its metadata service is asked, briefly."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from urllib.parse import urlsplit

_PATIENCE = 1.0
"""Seconds. The service answers in milliseconds; on other machines there may be nobody to say no."""


def has_aws_role(environment: Mapping[str, str]) -> bool:
    """Say whether this is a machine of Amazon's with a role."""
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    service = environment.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254"
    token = _ask(service, "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    return bool(
        token
        and _ask(service, "GET", "/latest/meta-data/iam/security-credentials/", {"X-aws-ec2-metadata-token": token})
    )


def has_google_account(environment: Mapping[str, str]) -> bool:
    """Say whether this is a machine of Google's with a service account."""
    service = f"http://{environment.get('GCE_METADATA_HOST') or 'metadata.google.internal'}"
    path = "/computeMetadata/v1/instance/service-accounts/default/email"
    return bool(_ask(service, "GET", path, {"Metadata-Flavor": "Google"}))


def _ask(service: str, method: str, path: str, headers: Mapping[str, str]) -> str:
    """Return the answer, or nothing if it is no, or there is none."""
    connection = http.client.HTTPConnection(urlsplit(service).netloc, timeout=_PATIENCE)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read(4096).decode("latin-1").strip()
        return body if answer.status == 200 else ""
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
