"""Child processes that always end: one group each, killed with us, log in a file. Used by engine.py and router.py."""

import atexit
import ctypes
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ENV = ROOT / ".env"
MODEL = ENV / "model"
PYTHON = ENV / "sglang" / "bin" / "python"
LOGS = ENV / "logs"

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_given_ports: set[int] = set()


class StartError(Exception):
    """A process ended or did not answer before its deadline; carries the end of its log."""


def free_port() -> int:
    """A loopback port that is free now and that no earlier call returned."""
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A started program. Start it from the main thread: the kernel ends it with the thread that made it."""

    def __init__(self, name: str, command: list, env: dict[str, str] | None = None):
        LOGS.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = LOGS / f"{name}.log"
        with open(self.log, "wb") as log:
            self.popen = subprocess.Popen(
                [str(c) for c in command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_die_with_parent, env={**os.environ, **(env or {})},
            )  # fmt: skip
        atexit.register(self.stop, 0)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def alive(self) -> bool:
        return self.popen.poll() is None

    def wait_until(self, ready, deadline_s: float) -> None:
        """Polls `ready()` until true; StartError when the process ends or the deadline passes."""
        until = time.monotonic() + deadline_s
        while not ready():
            if not self.alive():
                raise StartError(f"{self.name} ended with status {self.popen.returncode}\n{self.tail()}")
            if time.monotonic() > until:
                raise StartError(f"{self.name} was not ready after {deadline_s:.0f} s\n{self.tail()}")
            time.sleep(0.2)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        return f"--- end of {self.log.name}\n" + "\n".join(self.text().splitlines()[-lines:])

    def signal(self, number: int) -> None:
        """To the whole group, for example SIGSTOP."""
        os.killpg(self.pid, number)

    def stop(self, grace_s: float = 5) -> None:
        """Ends the group: politely first, if there is time. Safe to repeat."""
        atexit.unregister(self.stop)
        try:
            if self.alive() and grace_s:
                self.popen.terminate()
                try:
                    self.popen.wait(grace_s)
                except subprocess.TimeoutExpired:
                    pass
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()

    def members(self) -> dict[int, list[str]]:
        """By process id, the fields of /proc/PID/stat from the state on, of each live process of the group."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if int(fields[2]) == self.pid and fields[0] != "Z":
                found[int(stat.parent.name)] = fields
        return found

    def named(self, name: str) -> int:
        """The process of the group whose command line begins with `name`."""
        for pid in self.members():
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name.encode()):
                return pid
        raise AssertionError(f"{self.name} has no process {name}")

    def cpu_s(self) -> float:
        """User and system time of the group so far."""
        return sum(int(f[11]) + int(f[12]) for f in self.members().values()) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        """Resident memory of the group."""
        return sum(int(fields[21]) for fields in self.members().values()) * os.sysconf("SC_PAGE_SIZE") / 2**20
