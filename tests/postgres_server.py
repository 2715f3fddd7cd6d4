"""A PostgreSQL server of its own for a test."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tools


def postgres_programs() -> Path:
    """Return the folder of the newest PostgreSQL; Debian keeps it outside of the path. Skips the test without one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found:
        tools.require("initdb")
        return Path(shutil.which("initdb") or "").parent
    return found[-1].parent


@contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """Run a server that listens on a socket in ``folder``; yield the location of its database."""
    programs = postgres_programs()
    data, sockets = folder / "data", folder / "sockets"
    sockets.mkdir(parents=True)
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    if user is not None:
        for path in (folder, sockets):
            os.chown(path, pwd.getpwnam(user).pw_uid, -1)
        for path in folder.parents:
            if path.owner() == "root" and path != path.parent and not path.stat().st_mode & 0o001:
                path.chmod(path.stat().st_mode | 0o011)

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [programs / program, *arguments], check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL, timeout=60
        )

    run("initdb", "--pgdata", str(data), "--username", "nerite", "--auth", "trust", "--no-sync")
    options = f"-c listen_addresses='' -c unix_socket_directories={sockets} -c fsync=off"
    run("pg_ctl", "start", "--wait", "--pgdata", str(data), "--log", str(folder / "log"), "--options", options)
    try:
        yield f"postgresql://nerite@/postgres?host={sockets}"
    finally:
        run("pg_ctl", "stop", "--mode", "immediate", "--pgdata", str(data))
