from __future__ import annotations

from pathlib import Path

import pytest

from nerite.core.errors import InvalidArgument
from nerite.repository.remote.location import is_remote, read_location
from nerite.repository.remote.repository import cache_directory


@pytest.mark.parametrize(
    ("text", "endpoint", "account", "bucket", "path"),
    [
        ("s3://b", "", "", "b", ""),
        ("s3://b/some//path/", "", "", "b", "some/path"),
        ("s3://host:9000/b/path", "http://host:9000", "", "b", "path"),
        ("s3://http://10.0.0.1:9000/b", "http://10.0.0.1:9000", "", "b", ""),
        ("s3://https://host:443/b/path", "https://host:443", "", "b", "path"),
        ("s3://https://store.example/b/path", "https://store.example", "", "b", "path"),
        ("gs://b/path", "", "", "b", "path"),
        ("as://someone/b/path", "", "someone", "b", "path"),
    ],
)
def test_forms(text: str, endpoint: str, account: str, bucket: str, path: str) -> None:
    assert is_remote(text)
    location = read_location(text)
    assert (location.endpoint, location.account, location.bucket, location.path) == (endpoint, account, bucket, path)


@pytest.mark.parametrize("text", ["s3://", "s3://host:9000", "s3://https://host/", "gs:///", "as://someone", "as://"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"cannot read the location '{text}'. Write it as {text[:2]}://"):
        read_location(text)


@pytest.mark.parametrize("text", ["/models", "models", "s3:/b", "https://host/b", "./s3://b"])
def test_directories(text: str) -> None:
    assert not is_remote(text)


def test_each_place_has_its_own_directory() -> None:
    places = ["s3://b", "s3://b/c", "s3://h:1/b", "s3://https://h:1/b", "gs://b", "as://b/b", "as://c/b"]
    assert len({read_location(place).key for place in places}) == len(places)
    assert read_location("s3://b//c/").key == read_location("s3://b/c").key


@pytest.mark.parametrize(
    ("place", "flag", "environment", "root"),
    [
        ("s3://b", "", {"HOME": "/home/me"}, "/home/me/.cache/nerite/repositories"),
        ("s3://b", "", {"HOME": "/home/me", "XDG_CACHE_HOME": "/var/cache"}, "/var/cache/nerite/repositories"),
        ("s3://b", "", {"TRITON_AWS_MOUNT_DIRECTORY": "/mount"}, "/mount"),
        ("gs://b", "", {"TRITON_GCS_MOUNT_DIRECTORY": "/mount"}, "/mount"),
        ("as://a/b", "", {"TRITON_AZURE_MOUNT_DIRECTORY": "/mount"}, "/mount"),
        ("s3://b", "/flag", {"TRITON_AWS_MOUNT_DIRECTORY": "/mount"}, "/flag"),
    ],
)
def test_where_the_cache_is(place: str, flag: str, environment: dict[str, str], root: str) -> None:
    location = read_location(place)
    assert cache_directory(location, environment, flag) == Path(root) / location.key
