"""docs/several-hosts.md: its files are valid. ``make exam-hosts`` runs it all, on hosts in network namespaces."""

from __future__ import annotations

from pathlib import Path

from nerite.cli.command_line import NERITE, parse_command_line
from nerite.cluster.cluster_file import read_cluster
from nerite.router.discovery import MembersFile
from pages import Page

PAGE = Page("docs/several-hosts.md")


def test_the_files_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "members.txt").write_text(PAGE.block("gpu-1:8000"))
    for part in ("on the host in front\n[router]", "gpus.example.org"):
        (tmp_path / "cluster.toml").write_text(PAGE.block(part))
        (pool,) = read_cluster(str(tmp_path / "cluster.toml")).pools
        assert (pool.name, pool.grpc_port) == ("main", 8001)
        if pool.source.file:
            assert [member.name for member in MembersFile(pool).members] == [
                f"gpu-{number}:8000" for number in (1, 2, 3)
            ]


def test_the_command_of_the_hosts() -> None:
    words = PAGE.block("on gpu-1").splitlines()[1].split()
    assert words[:2] == ["nerite", "serve"]
    assert parse_command_line(words[2:], {}, NERITE).options.http.address == "0.0.0.0"
