"""Fills a folder with what a machine with a GPU and without a network lacks to run benchmarks/gpu_exam.py.

    python3.12 tools/gpu_kit.py build/gpu-kit

- ``wheels``: packages for Python 3.12 on Linux x86-64, of the versions that the development environment is pinned to.
  numpy and cuda-bindings are left out, for their size: such a machine has them.
- ``localhost.pem``: a certificate for loads over TLS.
- ``programs``: wrk and h2load, from Debian's packages, with their libraries down to the C library and its loader.

Then it proves that the folder is complete: a new environment is made of it, without a network, and a server in it is
asked by NVIDIA's client, wrk and h2load. The proof takes what was left out from elsewhere, and says so. Run by Python
3.12; needs apt-get, dpkg-deb and openssl, and a network until the proof begins.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_parts.environment import Kit, requirements, revision, write_certificate  # noqa: E402  the path comes first
from gpu_parts.result import PartResult  # noqa: E402

PYTHON: Final = (3, 12)
THERE: Final = ("numpy", "cuda_bindings")
"""Packages that the machine has, and that the proof takes from elsewhere; named as their wheels."""
LARGEST: Final = 40 * 2**20
PROGRAMS: Final = {"wrk": "wrk", "h2load": "nghttp2-client"}
"""Load generators, and Debian's packages of them."""
LOADER: Final = "ld-linux-x86-64.so.2"
_NEWEST_C_LIBRARY: Final = 28
"""Wheels for the C library 2.28 and older ones are taken: the names of some platforms say so by their year."""
_PLATFORMS: Final = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(_NEWEST_C_LIBRARY, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)
_START: Final = """\
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/..
exec "$here/lib/{loader}" --library-path "$here/lib" "$here/libexec/{program}" "$@"
"""
_LOOPBACK: Final = """
import fcntl, os, socket, struct, sys

with socket.socket() as any_socket:
    SIOCSIFFLAGS, IFF_UP = 0x8914, 1
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
os.execvp(sys.argv[1], sys.argv[1:])
"""


def main() -> None:
    """Fill the folder, print what is in it, and prove that it is complete."""
    if sys.version_info[:2] != PYTHON:
        sys.exit(f"this is Python {sys.version.split()[0]}, and the kit is for 3.12: make gpu-kit PYTHON312=PATH")
    if missing := [tool for tool in ("apt-get", "dpkg-deb", "openssl") if shutil.which(tool) is None]:
        sys.exit(f"{' and '.join(missing)} not found: this needs Debian or Ubuntu, whose packages have the generators")
    kit = Kit(Path(sys.argv[1]).resolve())
    shutil.rmtree(kit.folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        there = Path(name, "there")
        download_wheels(kit.wheels, there)
        download_programs(kit.programs.parent, Path(name, "debian"))
        write_certificate(kit.certificate)
        kit.description.write_text(json.dumps({"revision": revision()}, indent=1) + "\n")
        report(kit, there)
        prove(kit, there, Path(name, "proof"))


def download_wheels(folder: Path, there: Path) -> None:
    """Download what Nerite and NVIDIA's client need; packages of ``THERE`` go to another folder."""
    platforms = [f"--platform={platform}" for platform in _PLATFORMS]
    options = ["--only-binary=:all:", "--python-version=3.12", *platforms, f"--dest={folder}"]
    pinned = f"--constraint={ROOT / 'requirements' / 'dev.txt'}"
    run([sys.executable, "-m", "pip", "--quiet", "download", *options, pinned, *requirements()])
    there.mkdir()
    for wheel in [wheel for name in THERE for wheel in folder.glob(f"{name}-*.whl")]:
        wheel.rename(there / wheel.name)


def download_programs(folder: Path, debian: Path) -> None:
    """Write the load generators to ``bin``, with all libraries that they load, from packages unpacked in ``debian``."""
    debian.mkdir()
    for package in sorted(packages_of(debian, PROGRAMS.values())):
        run(["dpkg-deb", "-x", str(package), str(debian)])
    libraries = [str(place) for base in ("lib", "usr/lib") for place in (debian / base).glob("*-linux-gnu")]
    for sub in ("bin", "lib", "libexec"):
        (folder / sub).mkdir(parents=True)
    loader = next(path for path in debian.rglob(LOADER) if not path.is_symlink())
    shutil.copy(loader, folder / "lib" / LOADER)
    for program in PROGRAMS:
        binary = debian / "usr" / "bin" / program
        found = run([str(loader), "--library-path", ":".join(libraries), "--list", str(binary)])
        for name, path in re.findall(r"^\s*([^\s/]+) => (\S+)", found, re.MULTILINE):
            if not Path(path).is_relative_to(debian):
                raise RuntimeError(f"{program} needs {name}, which is in none of the packages: {path}")
            shutil.copy(path, folder / "lib" / name)
        shutil.copy(binary, folder / "libexec" / program)
        start = folder / "bin" / program
        start.write_text(_START.format(loader=LOADER, program=program))
        start.chmod(0o755)


def packages_of(folder: Path, names: Iterable[str]) -> list[Path]:
    """Download packages of Debian, and those that they depend on; of alternatives the first."""
    new, known = set(names), set()
    while new:
        run(["apt-get", "--quiet", "download", *sorted(new)], folder, "apt-get update may help")
        known |= new
        depends = "".join(
            f"{run(['dpkg-deb', '--field', str(package), 'Depends', 'Pre-Depends'])},"
            for name in new
            for package in folder.glob(f"{name}_*.deb")
        )
        new = set(re.findall(r"(?:[,\n]|Depends:)\s*([a-z0-9][a-z0-9.+-]+)", f",{depends}")) - known
    return list(folder.glob("*.deb"))


def report(kit: Kit, there: Path) -> None:
    """Print what takes how much, and what was left out. Exits if it is more than may travel."""
    sizes = {
        place.name: sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        for place in (kit.wheels, kit.programs.parent)
    }
    total = sum(sizes.values())
    for name, size in {**sizes, "together": total}.items():
        print(f"{name:10} {size / 2**20:5.1f} MiB")
    print(f"left out, as the machine has it: {', '.join(wheel.name for wheel in there.iterdir())}")
    if total > LARGEST:
        sys.exit(f"it has {total / 2**20:.1f} MiB, more than the {LARGEST / 2**20:.0f} MiB that may travel")


def prove(kit: Kit, there: Path, folder: Path) -> None:
    """Make an environment of the kit, without a network and packages of this Python, and serve in it."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_exam.py"), "--kind=KIND_CPU", "--only=machine"]
    command += [f"--kit={kit.folder}", f"--wheels={there}", "--isolated", f"--out={folder}"]
    within = next((way for way in _NAMESPACES if subprocess.run([*way, "true"], check=False).returncode == 0), None)
    if within is None:
        print("Proof, with a network that pip is told not to use: this user may not make a namespace without one")
    else:
        print("Proof, in a namespace without a network, with what was left out from elsewhere:")
        command = [*within, sys.executable, "-c", _LOOPBACK, *command]
    began = time.monotonic()
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": os.environ.get("LANG", "C.UTF-8")}
    status = subprocess.run(command, env=environment, check=False).returncode
    figures = PartResult.load(folder / "machine.json").figures if status == 0 else []
    if not all(any(figure.name.startswith(program) for figure in figures) for program in PROGRAMS):
        sys.exit(f"{kit.folder} is not complete: not everything could ask a server in an environment made of it")
    print(f"proven in {time.monotonic() - began:.0f} s")


_NAMESPACES: Final = (["unshare", "--net"], ["unshare", "--map-root-user", "--net"])
"""Ways to run a command without a network: as root, and as anybody where that is permitted."""


def run(command: Sequence[str], folder: Path | None = None, remedy: str = "") -> str:
    """Run a command, and return what it prints. Raises ``RuntimeError`` with its errors."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        hint = f" ({remedy})" if remedy else ""
        raise RuntimeError(f"{' '.join(command[:4])} failed{hint}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
