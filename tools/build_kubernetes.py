"""Builds Kubernetes 1.20, and takes etcd and nft from Debian's archive, for ``make exam-kubernetes``.

Usage: python tools/build_kubernetes.py [FOLDER]; without one, ~/.cache/nerite-kubernetes. The programs are then in
FOLDER/bin. No registry of images has to be reached and nothing is installed. Each step is done once: one that was
interrupted goes on where it was, as Go keeps every package that it has compiled.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path.home() / ".cache" / "nerite-kubernetes"
PROGRAMS: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
VERSION: Final = "1.20.2"
SOURCE: Final = "kubernetes"
"""Of bookworm: the last one that is whole, with all that it is built of. Later ones hold kubectl only."""
GO: Final = ("golang-1.15-go", "golang-1.15-src")
"""Kubernetes 1.20 was written for Go 1.15: what it is built of does not run when built by Go 1.18 or newer."""
PACKAGES: Final = (
    *GO, "etcd-server",
    "nftables", "libnftables1", "libnftnl11", "libmnl0", "libjansson4", "libxtables12", "libedit2", "libbsd0",
)  # fmt: skip
SUITES: Final = "deb {mirror} bullseye main\ndeb {mirror} bookworm main\ndeb-src {mirror} bookworm main\n"
_OTHERS: Final = ("vendor/k8s.io/code-generator/", "vendor/k8s.io/sample-", "vendor/k8s.io/gengo/")
"""Directories with types that the API server does not have."""
_WITHOUT_CLOUDS: Final = "-tags=providerless"
_MIRROR: Final = re.compile(r"^(?:URIs:|deb)\s.*?(https?://\S+/debian/?)(?:\s|$)", re.MULTILINE)


class Build:
    """The steps, in a folder that keeps what they have made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "source"
        self.go_root = folder / "packages" / "usr" / "lib" / "go-1.15"

    def run(self) -> None:
        """Do the steps that have not been done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._once("downloaded", self._download)
        self._once("unpacked", self._unpack)
        self._once("generated", self._generate)
        self._once("built", self._compile)

    def _once(self, name: str, step: Callable[[], None]) -> None:
        done = self.folder / f"{name}.done"
        if not done.exists():
            print(f"kubernetes {VERSION}: to be {name}", flush=True)
            step()
            done.touch()

    def _download(self) -> None:
        archives = self.folder / "archives"
        for each in ("archives/partial", "lists/partial", "apt"):
            (self.folder / each).mkdir(parents=True, exist_ok=True)
        (self.folder / "apt" / "sources.list").write_text(SUITES.format(mirror=_mirror()))
        options = [
            f"Dir::Etc::sourcelist={self.folder}/apt/sources.list",
            f"Dir::Etc::sourceparts={self.folder}/apt/none",
            f"Dir::State::lists={self.folder}/lists",
            f"Dir::Cache={self.folder}/apt",
            "APT::Sandbox::User=root",
            "Acquire::Languages=none",
            "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false",
        ]
        apt = ["apt-get", "-q", *(f"-o{option}" for option in options)]
        _call([*apt, "update"], archives)
        _call([*apt, "download", *PACKAGES], archives)
        _call([*apt, "source", "--download-only", SOURCE], archives)

    def _unpack(self) -> None:
        archives = self.folder / "archives"
        for package in PACKAGES:
            (file,) = archives.glob(f"{package}_*.deb")
            _call(["dpkg", "-x", file, self.folder / "packages"], archives)
        (description,) = archives.glob("kubernetes_*.dsc")
        shutil.rmtree(self.source, ignore_errors=True)
        _call(["dpkg-source", "--no-check", "-x", description, self.source], archives)

    def _generate(self) -> None:
        """Write the table of the API's types, which the source lacks: its build makes it of the comments there."""
        place = self.folder / "gopath" / "src" / "k8s.io"
        place.mkdir(parents=True, exist_ok=True)
        if not (link := place / "kubernetes").is_symlink():
            link.symlink_to(self.source)
        self._go("build", "-o", self.folder / "bin" / "openapi-gen", "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
        tag = ["grep", "-R", "--files-with-matches", "--include=*.go", "+k8s:openapi-gen="]
        found = _output([*tag, "pkg", "vendor/k8s.io"], self.source).splitlines()
        folders = {str(Path(file).parent) for file in found if not file.startswith(_OTHERS)}
        inputs = sorted(f"k8s.io/kubernetes/{folder}" for folder in folders)
        command = [self.folder / "bin" / "openapi-gen", "--output-file-base", "zz_generated.openapi"]
        command += ["--output-package", "k8s.io/kubernetes/pkg/generated/openapi", "--input-dirs", ",".join(inputs)]
        command += ["--go-header-file", "hack/boilerplate/boilerplate.generatego.txt", "--report-filename", "/dev/null"]
        environment = {**self._environment(modules=False), "PWD": str(link)}  # Go looks for vendor above this name
        _call([*command, "--output-base", self.folder / "gopath" / "src"], link, environment)

    def _compile(self) -> None:
        targets = [f"./cmd/{name}" for name in PROGRAMS if name != "etcd"]
        needed = len(self._go("list", "-deps", _WITHOUT_CLOUDS, *targets, shows=True).split())
        stamped = [
            f"-X k8s.io/{package}.{name}={value}"
            for package in ("component-base/version", "client-go/pkg/version")
            for name, value in {"gitVersion": f"v{VERSION}", "gitMajor": "1", "gitMinor": "20"}.items()
        ]
        command = [
            "build",
            "-p",
            "1",
            "-v",
            _WITHOUT_CLOUDS,
            "-ldflags",
            " ".join(["-s", "-w", *stamped]),
            "-o",
            self.folder / "bin",
        ]
        process = subprocess.Popen(
            [self.go_root / "bin" / "go", *command, *targets],
            cwd=self.source,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for number, line in enumerate(process.stdout, 1):
            if ".go:" in line:
                print(line.strip())
            else:
                print(f"compiled {number} of at most {needed} packages: {line.strip()}", flush=True)
        if process.wait():
            raise SystemExit("go build has failed")
        shutil.copy(self.folder / "packages" / "usr" / "bin" / "etcd", self.folder / "bin" / "etcd")

    def _go(self, *arguments: str | Path, shows: bool = False) -> str:
        command = [self.go_root / "bin" / "go", *arguments]
        if shows:
            return _output(command, self.source, self._environment())
        _call(command, self.source, self._environment())
        return ""

    def _environment(self, modules: bool = True) -> dict[str, str]:
        return {
            **os.environ,
            "GOROOT": str(self.go_root),
            "GOPATH": str(self.folder / "gopath"),
            "GOCACHE": str(self.folder / "compiled"),
            "GO111MODULE": "on" if modules else "off",
            "GOFLAGS": "-mod=vendor" if modules else "",
            "GOPROXY": "off",
            "GOMAXPROCS": os.environ.get("GOMAXPROCS", "1"),
            "CGO_ENABLED": "0",
            "PATH": f"{self.go_root / 'bin'}:{os.environ['PATH']}",
        }


def _mirror() -> str:
    """Return the mirror of Debian that this machine uses."""
    for file in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")):
        if file.exists() and (found := _MIRROR.search(file.read_text())):
            return found[1]
    return "http://deb.debian.org/debian"


def _call(command: Sequence[str | Path], where: Path, environment: dict[str, str] | None = None) -> None:
    if subprocess.run(command, cwd=where, env=environment, check=False).returncode:
        raise SystemExit(f"{' '.join(map(str, command))[:300]} has failed")


def _output(command: Sequence[str | Path], where: Path, environment: dict[str, str] | None = None) -> str:
    return subprocess.run(command, cwd=where, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    os.nice(19)
    Build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER).run()
