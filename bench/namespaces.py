"""Two network namespaces with a slow link between them: they stand for two hosts. Linux, as root, with iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

from bench.workers import Hosts

_CLONE_NEWNET = 0x40000000
_INTERFACE = "wire"


def are_possible() -> bool:
    """Whether this process may make namespaces."""
    return os.name == "posix" and os.geteuid() == 0 and bool(shutil.which("ip")) and bool(shutil.which("tc"))


class SlowLink:
    """While it lasts, ``hosts`` are two namespaces whose link carries ``rate`` (as ``tc`` writes it) each way."""

    def __init__(self, rate: str) -> None:
        self._names = [f"tf{os.getpid()}-{end}" for end in (0, 1)]
        self._rate = rate
        self.hosts = Hosts(self._names, _INTERFACE)

    def __enter__(self) -> SlowLink:
        for name in self._names:
            _run(f"ip netns add {name}")
        first, second = self._names
        _run(f"ip link add {_INTERFACE} netns {first} type veth peer name {_INTERFACE} netns {second}")
        for number, name in enumerate(self._names, 1):
            _run(f"ip -n {name} addr add 10.77.0.{number}/24 dev {_INTERFACE}")
            _run(f"ip -n {name} link set {_INTERFACE} up")
            _run(f"ip -n {name} link set lo up")
            _run(f"tc -n {name} qdisc add dev {_INTERFACE} root tbf rate {self._rate} burst 64kb latency 1s")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def enter(name: str, interface: str) -> None:
    """Move this process there, and let gloo use that interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({name})")
    finally:
        os.close(handle)
    os.environ["GLOO_SOCKET_IFNAME"] = interface


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
