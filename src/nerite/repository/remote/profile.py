"""The files of Amazon's command line, ``~/.aws/credentials`` and ``~/.aws/config``: keys and region of a profile."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from nerite.core.errors import InvalidArgument


class Profile(NamedTuple):
    """What the files say of one profile; fields they do not have are empty."""

    access_key_id: str = ""
    secret_access_key: str = ""
    session_token: str = ""
    region: str = ""


_ELSEWHERE = ("role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file")
"""Settings that say: the keys have to be fetched from somewhere."""


def read_profile(name: str, environment: Mapping[str, str]) -> Profile | None:
    """Return the profile, ``name`` or the usual one if that is empty; None if there is none of the usual name.

    Raises ``InvalidArgument`` for a named profile that is not there, and for one whose keys have to be fetched.
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
    fetched = [setting for setting in _ELSEWHERE if setting in settings]
    if fetched and not profile.access_key_id:
        raise InvalidArgument(
            f"AWS profile '{section}' has '{fetched[0]}', which is not supported. Put its keys into the environment: "
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
