"""Containers of pods: processes in namespaces of their own, with the mounts, user and limits of rights of the manifest.

There is no image: the root is that of this machine under an overlay, so that ``nerite`` is the one of the tests.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROGRAMS = Path(sys.executable).parent
_ROOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {folder}/layer
mkdir {folder}/layer/upper {folder}/layer/work {folder}/layer/root
root={folder}/layer/root
mount -t overlay overlay -o lowerdir=/,upperdir={folder}/layer/upper,workdir={folder}/layer/work $root
chmod 755 $root/root
mount -t proc proc $root/proc
mount --rbind /dev $root/dev
mount --bind /sys $root/sys
mkdir $root/volumes
{sources}
exec chroot $root sh -c {inner}
"""
_RIGHTS = "setpriv --no-new-privs --bounding-set=-all --inh-caps=-all"


def _calls(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


class Sandbox:
    """The network namespace of a pod, on the bridge of its host."""

    def __init__(self, name: str, address: str, bridge: str, gateway: str) -> None:
        self.name = name
        self.address = address
        inner, outer = f"i{name}", f"o{name}"
        _calls(["ip", "netns", "add", name])
        _calls(["ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name])
        _calls(["ip", "link", "set", outer, "master", bridge, "up"])
        for command in (
            f"link set {inner} name eth0",
            "link set lo up",
            "link set eth0 up",
            f"addr add {address}/16 dev eth0",
            f"route add default via {gateway}",
        ):
            _calls(["ip", "-n", name, *command.split()])

    def remove(self) -> None:
        """Remove it, with its network device."""
        _calls(["ip", "netns", "del", self.name])


class Container:
    """A container that runs: its process is the first one of a PID namespace."""

    def __init__(
        self, pod: dict[str, Any], sandbox: Sandbox, folder: Path, volumes: dict[str, Path], environment: dict[str, str]
    ) -> None:
        """``volumes``: where the volumes of the pod are, by name."""
        (spec,) = pod["spec"]["containers"]
        self.log = folder / "log"
        user = pod["spec"].get("securityContext", {})
        self._as = f"--reuid={user.get('runAsUser', 0)} --regid={user.get('runAsGroup', 0)} --clear-groups"
        self._environment = {
            "PATH": f"{_PROGRAMS}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **environment,
            **{each["name"]: each.get("value", "") for each in spec.get("env", ())},
        }
        layer = folder / "layer"
        shutil.rmtree(layer, ignore_errors=True)
        layer.mkdir(parents=True)
        script = self._script(spec, folder, volumes)
        within = ["ip", "netns", "exec", sandbox.name, "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*within, "sh", "-c", script], stdout=log, stderr=log)

    def _script(self, spec: dict[str, Any], folder: Path, volumes: dict[str, Path]) -> str:
        sources, mounts = [], []
        for number, mount in enumerate(spec.get("volumeMounts", ())):
            source, place = f"/volumes/{number}", shlex.quote(mount["mountPath"])
            made = volumes[mount["name"]]
            sources += [f"mkdir $root{source}", f"mount --bind {made} $root{source}"]
            mounts += [f"mkdir -p {place}", f"mount --bind {source} {place}"]
            if mount.get("readOnly"):
                mounts.append(f"mount -o remount,bind,ro {place}")
        if spec.get("securityContext", {}).get("readOnlyRootFilesystem"):
            mounts.append("mount -o remount,ro /")
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self._environment.items())
        command = shlex.join([*spec.get("command", ()), *spec.get("args", ())])
        inner = " && ".join(["cd /", *mounts, f"exec env -i {variables} {_RIGHTS} {self._as} {command}"])
        return _ROOT.format(folder=folder, sources="\n".join(sources), inner=shlex.quote(inner))

    @property
    def status(self) -> int | None:
        """Its exit status, 128 more than the signal that ended it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def _first(self) -> int:
        """Return the process that is the first one inside. Raises ``OSError`` if it has ended."""
        process = self._process.pid  # `ip netns exec` has become unshare, whose only child it is
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        if not children:
            raise ProcessLookupError
        return int(children[0])

    def execute(self, command: list[str], seconds: float) -> None:
        """Run a command inside, for so many seconds at most."""
        with suppress(OSError, subprocess.TimeoutExpired):
            inside = ["nsenter", f"--target={self._first()}", "--mount", "--net", "--pid", "--root", "--wd=/"]
            program = ["env", "-i", *(f"{name}={value}" for name, value in self._environment.items())]
            subprocess.run(
                [*inside, *program, *_RIGHTS.split(), *self._as.split(), *command],
                timeout=seconds,
                check=False,
                capture_output=True,
            )

    def signal(self, number: int) -> None:
        """Send a signal to its process."""
        with suppress(OSError):
            os.kill(self._first(), number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; say whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0))
        return self.status is not None

    def kill(self) -> None:
        """End it at once, with all its processes."""
        self.signal(signal.SIGKILL)
        if not self.wait(10):
            self._process.kill()
            self._process.wait(10)


def make_volume(volume: dict[str, Any], folder: Path, find: Any) -> Path:
    """Make a volume of a pod in a folder; return where it is. ``find(plural, name)`` returns an object of the API."""
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    place = folder / volume["name"]
    place.mkdir(parents=True)
    if "emptyDir" in volume:
        if volume["emptyDir"].get("medium") == "Memory":
            _calls(["mount", "-t", "tmpfs", "tmpfs", str(place)])
        place.chmod(0o777)
        return place
    for file, data in _files(volume, find).items():
        (place / file).write_bytes(data)
        (place / file).chmod(0o644)
    return place


def _files(volume: dict[str, Any], find: Any) -> dict[str, bytes]:
    if "configMap" in volume:
        found = find("configmaps", volume["configMap"]["name"]).get("data", {})
        return {name: text.encode() for name, text in found.items()}
    if "secret" in volume:
        found = find("secrets", volume["secret"]["secretName"]).get("data", {})
        return {name: base64.b64decode(text) for name, text in found.items()}
    raise ValueError(f"this kubelet has no volumes such as {json.dumps(volume)}")


def remove_volumes(folder: Path) -> None:
    """Remove the volumes that were made in a folder."""
    for place in folder.iterdir() if folder.exists() else ():
        if place.is_mount():
            _calls(["umount", str(place)])
    shutil.rmtree(folder, ignore_errors=True)
