"""Opens the object store of a location with credentials from Triton's file, else from the environment, else none.

The environment includes AWS profiles and the metadata services of cloud machines.
"""

from __future__ import annotations

import configparser
import http.client
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import orjson
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from nerite.core.errors import InvalidArgument
from nerite.repository.remote.location import Location

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config, S3Credential

# AWS profiles, from ``~/.aws/credentials`` and ``~/.aws/config``.


class Profile(NamedTuple):
    """Keys and region of an AWS profile; missing fields are empty."""

    access_key_id: str = ""
    secret_access_key: str = ""
    session_token: str = ""
    region: str = ""


_INDIRECT = ("role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file")
"""Settings of profiles whose keys must be fetched from another service."""


def read_profile(name: str, environment: Mapping[str, str]) -> Profile | None:
    """Return the profile ``name``, or the default one if that is empty; None if there is no default profile.

    Raises ``InvalidArgument`` if a named profile is missing, or if its keys must be fetched from another service.
    """
    home = Path(environment.get("HOME") or Path.home())
    credentials = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
    config = Path(environment.get("AWS_CONFIG_FILE") or home / ".aws" / "config")
    wanted = name or environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or ""
    section = wanted or "default"
    settings: dict[str, str] = {}
    for path, title in ((config, section if section == "default" else f"profile {section}"), (credentials, section)):
        settings |= _section(path, title)
    if not settings:
        if not wanted:
            return None
        raise InvalidArgument(f"AWS profile '{wanted}' is neither in '{credentials}' nor in '{config}'")
    profile = Profile(
        settings.get("aws_access_key_id", ""),
        settings.get("aws_secret_access_key", ""),
        settings.get("aws_session_token", ""),
        settings.get("region", ""),
    )
    fetched = [setting for setting in _INDIRECT if setting in settings]
    if fetched and not profile.access_key_id:
        raise InvalidArgument(
            f"AWS profile '{section}' has '{fetched[0]}', which is not supported. Export its keys to the environment: "
            f'eval "$(aws configure export-credentials --profile {section} --format env)"'
        )
    return profile


def _section(path: Path, title: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read '{path}': {error}") from None
    return dict(parser.items(title)) if parser.has_section(title) else {}


# Cloud identity of this machine, from its metadata service.

_METADATA_TIMEOUT = 1.0
"""Seconds. The service answers in milliseconds; elsewhere the connection attempt may just hang."""


def has_aws_role(environment: Mapping[str, str]) -> bool:
    """Return whether this is an Amazon EC2 machine with a role."""
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    service = environment.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254"
    token = _query(service, "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    return bool(
        token
        and _query(service, "GET", "/latest/meta-data/iam/security-credentials/", {"X-aws-ec2-metadata-token": token})
    )


def has_google_account(environment: Mapping[str, str]) -> bool:
    """Return whether this is a Google Cloud machine with a service account."""
    service = f"http://{environment.get('GCE_METADATA_HOST') or 'metadata.google.internal'}"
    path = "/computeMetadata/v1/instance/service-accounts/default/email"
    return bool(_query(service, "GET", path, {"Metadata-Flavor": "Google"}))


def _query(service: str, method: str, path: str, headers: Mapping[str, str]) -> str:
    """Query a metadata service; return an empty text if it refuses or does not answer."""
    connection = http.client.HTTPConnection(urlsplit(service).netloc, timeout=_METADATA_TIMEOUT)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read(4096).decode("latin-1").strip()
        return body if answer.status == 200 else ""
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


# The file of ``TRITON_CLOUD_CREDENTIAL_PATH``: credentials for several locations, in JSON.
#
#     {"s3": {"": {...}, "s3://bucket": {...}}, "gs": {"": "<path of a key file>"}, "as": {...}}
#
# The entry with the longest prefix of a location applies.

VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"


class GivenCredentials(NamedTuple):
    """Entry for a location in the file of ``TRITON_CLOUD_CREDENTIAL_PATH``."""

    entry: Any
    """A path for Google; an object with strings for the others."""
    source: str
    """Description of the entry for error messages."""

    def text(self, field: str) -> str:
        """Return a field of the object; empty if it is missing."""
        return str(self.entry.get(field) or "")


def credentials_for(location: Location, environment: Mapping[str, str]) -> GivenCredentials | None:
    """Return the file's entry for ``location``; None without a file or an entry. Raises ``InvalidArgument``."""
    path = environment.get(VARIABLE)
    if not path:
        return None
    try:
        content = orjson.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot read '{path}', which {VARIABLE} names: {error}") from None
    entries = content.get(location.kind, {}) if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise InvalidArgument(
            f"'{path}', which {VARIABLE} names, must be an object that contains objects named 'gs', 's3' and 'as'"
        )
    names = [name for name in entries if location.text.startswith(name)]
    if not names:
        return None
    name = max(names, key=len)
    source = f'the entry "{location.kind}" / "{name}" of \'{path}\''
    wanted: type = str if location.kind == "gs" else dict
    if not isinstance(entries[name], wanted):
        what = "the path of a key file" if wanted is str else "an object"
        raise InvalidArgument(f"{source} must be {what}")
    return GivenCredentials(entries[name], source)


# A file may take hours; the read timeout applies while bytes stop arriving.
_CLIENT: ClientConfig = {"allow_http": True, "connect_timeout": "5s", "read_timeout": "20s", "timeout": "30 days"}
# Retries are ours: they log, and resume a download where it broke off.
_RETRIES: RetryConfig = {"max_retries": 0}

_S3_REMEDY = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN for temporary keys), or AWS_PROFILE, "
    "to keys that may list the bucket and read its objects"
)
_GS_REMEDY = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to the key file of an account that may list the bucket and read its objects"
)
_AS_REMEDY = (
    "Set AZURE_STORAGE_KEY to a key of this storage account, or AZURE_STORAGE_AUTH_TYPE=managed_identity "
    "if the machine's identity has the role Storage Blob Data Reader"
)


class OpenedStore(NamedTuple):
    """Client of an object store, with the texts for its error messages."""

    location: Location
    client: S3Store | GCSStore | AzureStore
    signed: str
    """Source of the credentials that sign requests; empty if requests are not signed."""
    remedy: str
    """What to do when access is denied."""


def open_store(location: Location, environment: Mapping[str, str]) -> OpenedStore:
    """Open the store of a location. Raises ``InvalidArgument`` for invalid credentials.

    The library reads further variables itself: endpoints, web identities, roles of containers.
    """
    given = credentials_for(location, environment)
    try:
        match location.kind:
            case "s3":
                return _open_s3(location, given, environment)
            case "gs":
                return _open_google(location, given, environment)
            case "as":
                return _open_azure(location, given, environment)
    except (BaseError, ValueError, OSError) as error:
        reason = str(error).partition("\n\nDebug source")[0]
        raise InvalidArgument(f"cannot open the model repository '{location.text}': {reason}") from None


def _open_s3(location: Location, given: GivenCredentials | None, environment: Mapping[str, str]) -> OpenedStore:
    keys, signed = _s3_keys(given, environment)
    region = (
        (given.text("region") if given is not None else "")
        or environment.get("AWS_REGION")
        or environment.get("AWS_DEFAULT_REGION")
        or (keys.region if keys is not None else "")
        or "us-east-1"
    )
    config: S3Config = {"region": region}
    if location.endpoint:
        config["endpoint"] = location.endpoint
    provider: Callable[[], S3Credential] | None = None
    if keys is not None and keys.access_key_id:
        # As a provider, so that variables which the library reads itself are not mixed with these keys.
        provider = partial(_credential, keys)
    elif not signed:
        config["skip_signature"] = True
    client = S3Store(
        location.bucket, config=config, client_options=_CLIENT, retry_config=_RETRIES, credential_provider=provider
    )
    return OpenedStore(location, client, signed, _S3_REMEDY)


def _credential(keys: Profile) -> S3Credential:
    return {
        "access_key_id": keys.access_key_id,
        "secret_access_key": keys.secret_access_key,
        "token": keys.session_token or None,
        "expires_at": None,
    }


def _s3_keys(given: GivenCredentials | None, environment: Mapping[str, str]) -> tuple[Profile | None, str]:
    """Return the keys, if known here, and the source of the credentials; an empty source means unsigned requests."""
    if given is not None:
        if given.text("key_id"):
            return Profile(*map(given.text, ("key_id", "secret_key", "session_token"))), given.source
        if name := given.text("profile"):
            return read_profile(name, environment), f"the profile '{name}' of {given.source}"
    if environment.get("AWS_ACCESS_KEY_ID"):
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        return Profile(*(environment.get(name, "") for name in names)), "AWS_ACCESS_KEY_ID"
    profile = read_profile("", environment)
    if profile is not None and profile.access_key_id:
        return profile, f"the AWS profile '{environment.get('AWS_PROFILE') or 'default'}'"
    for variable in (
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ):
        if environment.get(variable):
            return profile, variable
    return profile, "the role of this machine" if has_aws_role(environment) else ""


def _open_google(location: Location, given: GivenCredentials | None, environment: Mapping[str, str]) -> OpenedStore:
    config: GCSConfig = {}
    path = given.entry if given is not None else environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    usual = Path(environment.get("HOME") or Path.home()) / ".config" / "gcloud" / "application_default_credentials.json"
    if path:
        signed = f"'{path}', which {given.source if given else 'GOOGLE_APPLICATION_CREDENTIALS'} names"
        if not Path(path).is_file():
            raise InvalidArgument(f"cannot open the model repository '{location.text}': file not found: {signed}")
        config["application_credentials"] = path
    elif usual.is_file():
        signed = f"'{usual}'"
    else:
        signed = "the service account of this machine" if has_google_account(environment) else ""
    if not signed:
        config["skip_signature"] = True
    if emulator := environment.get("STORAGE_EMULATOR_HOST", ""):
        config["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
    client = GCSStore(location.bucket, config=config, client_options=_CLIENT, retry_config=_RETRIES)
    return OpenedStore(location, client, signed, _GS_REMEDY)


def _open_azure(location: Location, given: GivenCredentials | None, environment: Mapping[str, str]) -> OpenedStore:
    if given is not None:
        key, auth, identity = (given.text(field) for field in ("account_key", "auth_type", "client_id"))
        source = given.source
    else:
        names = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_AUTH_TYPE", "AZURE_STORAGE_CLIENT_ID")
        key, auth, identity = (environment.get(name, "") for name in names)
        source = "AZURE_STORAGE_AUTH_TYPE" if auth else "AZURE_STORAGE_KEY"
    config: AzureConfig = {"account_name": location.account}
    if auth not in ("", "default", "managed_identity"):
        raise InvalidArgument(
            f"cannot open the model repository '{location.text}': the authentication type '{auth}' of {source} is "
            "unknown. Use 'managed_identity' or 'default', or omit it to use the account's key."
        )
    if auth == "managed_identity":
        config["credential_type"] = "managed_identity"
    elif auth == "" and key:
        config["credential_type"] = "access_key"
        config["account_key"] = key
    elif auth == "":
        source = ""
        config["skip_signature"] = True
    if auth and identity:
        config["client_id"] = identity
    client = AzureStore(location.bucket, config=config, client_options=_CLIENT, retry_config=_RETRIES)
    return OpenedStore(location, client, source, _AS_REMEDY)
