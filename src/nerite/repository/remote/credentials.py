"""Opens the store of a location: with the credentials of Triton's file, else of the environment, else with none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from nerite.core.errors import InvalidArgument
from nerite.repository.remote.credential_file import Given, credentials_for
from nerite.repository.remote.location import Location
from nerite.repository.remote.metadata import has_aws_role, has_google_account
from nerite.repository.remote.profile import Profile, read_profile

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config, S3Credential

# A file may take hours; what counts is that bytes keep coming.
_CLIENT: ClientConfig = {"allow_http": True, "connect_timeout": "5s", "read_timeout": "20s", "timeout": "30 days"}
# We try again ourselves: with a line in the log, and from where a download broke off.
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
    "where the machine's identity has the role Storage Blob Data Reader"
)


class Opened(NamedTuple):
    """A store, and what to say when it refuses."""

    location: Location
    client: S3Store | GCSStore | AzureStore
    signed: str
    """Whose credentials go with each request."""
    remedy: str


def open_store(location: Location, environment: Mapping[str, str]) -> Opened:
    """Return the store of a location. Raises ``InvalidArgument`` for credentials that cannot be right.

    Beyond what is handled here the library reads variables of its own: endpoints, web identities, roles of containers.
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


def _open_s3(location: Location, given: Given | None, environment: Mapping[str, str]) -> Opened:
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
        # As a provider, so that no variable that the library reads by itself gets between the keys.
        provider = partial(_credential, keys)
    elif not signed:
        config["skip_signature"] = True
    client = S3Store(
        location.bucket, config=config, client_options=_CLIENT, retry_config=_RETRIES, credential_provider=provider
    )
    return Opened(location, client, signed, _S3_REMEDY)


def _credential(keys: Profile) -> S3Credential:
    return {
        "access_key_id": keys.access_key_id,
        "secret_access_key": keys.secret_access_key,
        "token": keys.session_token or None,
        "expires_at": None,
    }


def _s3_keys(given: Given | None, environment: Mapping[str, str]) -> tuple[Profile | None, str]:
    """Return the keys, as far as they are known, and whose credentials they are; empty: nobody's."""
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


def _open_google(location: Location, given: Given | None, environment: Mapping[str, str]) -> Opened:
    config: GCSConfig = {}
    path = given.entry if given is not None else environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    usual = Path(environment.get("HOME") or Path.home()) / ".config" / "gcloud" / "application_default_credentials.json"
    if path:
        signed = f"'{path}', which {given.source if given else 'GOOGLE_APPLICATION_CREDENTIALS'} names"
        if not Path(path).is_file():
            raise InvalidArgument(f"cannot open the model repository '{location.text}': there is no file {signed}")
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
    return Opened(location, client, signed, _GS_REMEDY)


def _open_azure(location: Location, given: Given | None, environment: Mapping[str, str]) -> Opened:
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
            "unknown. Write 'managed_identity' or 'default', or leave it out to use the account's key."
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
    return Opened(location, client, source, _AS_REMEDY)
