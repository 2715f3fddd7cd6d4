"""Whose credentials are taken for a place: of Triton's file, of the environment, of the usual files, or nobody's."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from nerite.core.errors import InvalidArgument
from nerite.repository.remote.credentials import (
    OpenedStore,
    credentials_for,
    has_aws_role,
    has_google_account,
    open_store,
)
from nerite.repository.remote.location import read_location
from pages import Page

NOBODY = {"AWS_EC2_METADATA_DISABLED": "true", "GCE_METADATA_HOST": "127.0.0.1:1"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library looks at the process's own."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)


def opened(place: str, home: Path, **environment: str) -> OpenedStore:
    return open_store(read_location(place), {"HOME": str(home), **NOBODY, **environment})


def keys(store: OpenedStore) -> Any:
    """What an S3 request would be signed with."""
    provider: Any = store.client.credential_provider
    credential = provider()
    return credential["access_key_id"], credential["secret_access_key"], credential["token"]


def config(store: OpenedStore) -> dict[str, Any]:
    found: Any = store.client.config
    return dict(found)


def file(folder: Path, content: object) -> dict[str, str]:
    """Write Triton's file of credentials; return the variable that names it."""
    path = folder / "credentials.json"
    path.write_text(json.dumps(content))
    return {"TRITON_CLOUD_CREDENTIAL_PATH": str(path)}


def aws(home: Path, credentials: str, config: str = "") -> None:
    (home / ".aws").mkdir()
    (home / ".aws" / "credentials").write_text(credentials)
    (home / ".aws" / "config").write_text(config)


PROFILES = """
[default]
aws_access_key_id = usual
aws_secret_access_key = secret
[other]
aws_access_key_id = mine
aws_secret_access_key = hidden
aws_session_token = passing
"""
REGIONS = "[default]\nregion = eu-west-1\n[profile other]\nregion = eu-north-1\n"


def test_amazon_keys_of_the_environment(tmp_path: Path) -> None:
    aws(tmp_path, PROFILES)
    given = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "c"}
    store = opened("s3://b", tmp_path, **given, AWS_DEFAULT_REGION="eu-south-1")
    assert (keys(store), store.signed, config(store)["region"]) == (("a", "b", "c"), "AWS_ACCESS_KEY_ID", "eu-south-1")


@pytest.mark.parametrize(
    ("environment", "wanted", "region"),
    [
        ({}, ("usual", "secret", None), "eu-west-1"),
        ({"AWS_PROFILE": "other"}, ("mine", "hidden", "passing"), "eu-north-1"),
        ({"AWS_PROFILE": "other", "AWS_REGION": "eu-south-1"}, ("mine", "hidden", "passing"), "eu-south-1"),
    ],
)
def test_amazon_profiles(
    tmp_path: Path, environment: dict[str, str], wanted: tuple[str, str, str | None], region: str
) -> None:
    aws(tmp_path, PROFILES, REGIONS)
    store = opened("s3://b", tmp_path, **environment)
    assert (keys(store), config(store)["region"]) == (wanted, region)


def test_amazon_files_in_other_places(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(PROFILES)
    (tmp_path / "settings").write_text(REGIONS)
    files = {name: str(tmp_path / path) for name, path in
             {"AWS_SHARED_CREDENTIALS_FILE": "keys", "AWS_CONFIG_FILE": "settings"}.items()}  # fmt: skip
    store = opened("s3://b", tmp_path, **files, AWS_PROFILE="other")
    assert (keys(store)[0], config(store)["region"]) == ("mine", "eu-north-1")


def test_an_amazon_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"AWS profile 'nobody' is neither in '.*credentials' nor in '.*config'"):
        opened("s3://b", tmp_path, AWS_PROFILE="nobody")


@pytest.mark.parametrize(("title", "name"), [("profile work", "work"), ("default", "default")])
def test_an_amazon_profile_that_fetches_its_keys(tmp_path: Path, title: str, name: str) -> None:
    aws(tmp_path, "", f"[{title}]\nsso_session = work\n")
    wanted = rf"AWS profile '{name}' has 'sso_session', which is not supported.* --profile {name} --format env"
    with pytest.raises(InvalidArgument, match=wanted):
        opened("s3://b", tmp_path, **({} if name == "default" else {"AWS_PROFILE": name}))


@pytest.mark.parametrize("place", ["s3://b", "gs://b", "as://a/b"])
def test_nobodys_credentials(tmp_path: Path, place: str) -> None:
    store = opened(place, tmp_path)
    assert store.signed == ""
    assert str(config(store)["skip_signature"]).lower() == "true"


@pytest.mark.parametrize("variable", ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI"])
def test_amazon_identities_that_the_library_knows(tmp_path: Path, variable: str) -> None:
    store = opened("s3://b", tmp_path, **{variable: "x"})
    assert store.signed == variable
    assert store.client.credential_provider is None
    assert "skip_signature" not in config(store)


FILE = {
    "s3": {
        "": {"key_id": "any", "secret_key": "s", "session_token": "", "region": "", "profile": ""},
        "s3://b": {"key_id": "b", "secret_key": "s", "session_token": "t", "region": "eu-west-3"},
        "s3://b/deep": {"profile": "other"},
        "s3://https://host:9000/b": {"key_id": "own", "secret_key": "s"},
    },
    "gs": {"": ""},
    "as": {
        "": {"account_str": "a", "account_key": "a2V5"},
        "as://a/identity": {"account_str": "a", "auth_type": "managed_identity", "client_id": "me"},
    },
}


@pytest.mark.parametrize(
    ("place", "wanted", "source"),
    [
        ("s3://other", ("any", "s", None), 'the entry "s3" / "" of \''),
        ("s3://b/models", ("b", "s", "t"), 'the entry "s3" / "s3://b" of'),
        ("s3://b/deep/models", ("mine", "hidden", "passing"), "the profile 'other' of the entry"),
        ("s3://https://host:9000/b/models", ("own", "s", None), 'the entry "s3" / "s3://https://host:9000/b"'),
    ],
)
def test_the_longest_name_in_tritons_file(
    tmp_path: Path, place: str, wanted: tuple[str, str, str | None], source: str
) -> None:
    aws(tmp_path, PROFILES, REGIONS)
    store = opened(place, tmp_path, **file(tmp_path, FILE), AWS_ACCESS_KEY_ID="not", AWS_SECRET_ACCESS_KEY="asked")
    assert keys(store) == wanted
    assert store.signed.startswith(source)


def test_azure_in_tritons_file(tmp_path: Path) -> None:
    store = opened("as://a/b", tmp_path, **file(tmp_path, FILE), AZURE_STORAGE_KEY="bm90")
    assert (config(store)["account_name"], config(store)["account_key"]) == ("a", "a2V5")
    store = opened("as://a/identity/models", tmp_path, **file(tmp_path, FILE))
    assert (config(store)["credential_type"], config(store)["client_id"]) == ("managed_identity", "me")
    assert "account_key" not in config(store)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], "must be an object that contains objects named 'gs', 's3' and 'as'"),
        ({"s3": []}, "must be an object that contains objects named"),
        ({"s3": {"": "a path"}}, "must be an object"),
    ],
)
def test_mistakes_in_tritons_file(tmp_path: Path, content: object, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        opened("s3://b", tmp_path, **file(tmp_path, content))


def test_azure_by_the_environment(tmp_path: Path) -> None:
    assert config(opened("as://a/b", tmp_path, AZURE_STORAGE_KEY="a2V5"))["account_key"] == "a2V5"
    managed = {"AZURE_STORAGE_AUTH_TYPE": "managed_identity", "AZURE_STORAGE_CLIENT_ID": "me"}
    store = opened("as://a/b", tmp_path, **managed, AZURE_STORAGE_KEY="a2V5")
    assert (config(store)["credential_type"], config(store)["client_id"]) == ("managed_identity", "me")
    assert store.signed == "AZURE_STORAGE_AUTH_TYPE"
    assert "credential_type" not in config(opened("as://a/b", tmp_path, AZURE_STORAGE_AUTH_TYPE="default"))
    with pytest.raises(InvalidArgument, match="the authentication type 'guess' of AZURE_STORAGE_AUTH_TYPE is unknown"):
        opened("as://a/b", tmp_path, AZURE_STORAGE_AUTH_TYPE="guess")
    with pytest.raises(InvalidArgument, match=r"cannot open the model repository 'as://a/b': .*Invalid Access Key"):
        opened("as://a/b", tmp_path, AZURE_STORAGE_KEY="!")


def test_google_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    with pytest.raises(InvalidArgument, match=f"file not found: '{path}', which GOOGLE_APPLICATION_CREDENTIALS names"):
        opened("gs://b", tmp_path, GOOGLE_APPLICATION_CREDENTIALS=str(path))
    user = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
    path.write_text(json.dumps(user))
    store = opened("gs://b", tmp_path, GOOGLE_APPLICATION_CREDENTIALS=str(path))
    assert (config(store)["application_credentials"], store.signed) == (
        str(path),
        f"'{path}', which GOOGLE_APPLICATION_CREDENTIALS names",
    )
    store = opened("gs://b", tmp_path, **file(tmp_path, {"gs": {"gs://b": str(path)}}))
    assert config(store)["application_credentials"] == str(path)
    path.write_text("{}")
    with pytest.raises(InvalidArgument, match="cannot open the model repository 'gs://b'"):
        opened("gs://b", tmp_path, GOOGLE_APPLICATION_CREDENTIALS=str(path))


@contextmanager
def metadata_service(answers: dict[str, str]) -> Iterator[str]:
    """Run a service that has these answers, each to a method and a path; return its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(f"{self.command} {self.path}")
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


TOKEN, ROLES = "PUT /latest/api/token", "GET /latest/meta-data/iam/security-credentials/"
ACCOUNT = "GET /computeMetadata/v1/instance/service-accounts/default/email"


def test_the_identity_of_the_machine() -> None:
    with metadata_service({TOKEN: "t", ROLES: "reader", ACCOUNT: "me@example"}) as address:
        assert has_aws_role({"AWS_METADATA_ENDPOINT": f"http://{address}"})
        assert not has_aws_role({"AWS_METADATA_ENDPOINT": f"http://{address}", "AWS_EC2_METADATA_DISABLED": "True"})
        assert has_google_account({"GCE_METADATA_HOST": address})
    with metadata_service({TOKEN: "t"}) as address:
        assert not has_aws_role({"AWS_METADATA_ENDPOINT": f"http://{address}"})
        assert not has_google_account({"GCE_METADATA_HOST": address})
    assert not has_aws_role({"AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"})


def test_the_file_in_the_documents(tmp_path: Path) -> None:
    environment = file(tmp_path, json.loads(Page("docs/repositories.md").block("s3://")))
    for place, entry in {
        "s3://some/models": {"key_id": "…", "secret_key": "…", "region": "eu-west-1"},
        "s3://https://minio:9000/bucket/models": {"profile": "minio"},
        "gs://bucket/models": "/secrets/google.json",
        "as://account/container": {"account_key": "…"},
    }.items():
        given = credentials_for(read_location(place), environment)
        assert given is not None and given.entry == entry
