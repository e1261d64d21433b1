"""The router's binary in front of real workers."""

from urllib.parse import quote

from .engine import Generate
from .http import Answer, Client
from .module import Worker
from .process import ROOT, Process, free_port

BINARY = ROOT / "target" / "debug" / "kvc-router"
RELEASE = ROOT / "target" / "release" / "kvc-router"


class Router(Generate):
    """A `kvc-router` process. `workers`: (role, url)."""

    def __init__(self, name: str, workers, flags=(), release: bool = False):
        self.name, self.port = name, free_port()
        self.http = Client(self.port)
        self.workers = list(workers)
        self.binary = RELEASE if release else BINARY
        self.command = [self.binary, "--listen", f"127.0.0.1:{self.port}"]
        for role, url in self.workers:
            self.command += ["--worker", f"role={role},url={url}"]
        self.command += list(flags)
        self._process: Process | None = None

    def start(self) -> "Router":
        assert self.binary.exists(), "build it first: cargo build -p kvc-router"
        self._process = Process(self.name, self.command)
        self.process.wait_until(self.sees_all, 30)
        return self

    def sees_all(self) -> bool:
        """Every worker has told what it is."""
        try:
            seen = self.http.get("/v1/workers", timeout_s=2).json
        except (OSError, ValueError):
            return False
        return sum(w["health"] == "up" for w in seen) == len(self.workers)

    def sees(self, worker: Worker) -> dict:
        """What it thinks of the worker."""
        return next(w for w in self.http.get("/v1/workers").json if worker.url.endswith(w["worker"]))

    def knows(self, worker: Worker) -> bool:
        """It has seen the worker's present process up."""
        seen = self.sees(worker)
        return seen["health"] == "up" and seen["incarnation"] == worker.info["incarnation"]

    def state(self) -> dict:
        return self.http.get("/v1/router/state").json

    def move(self, sid: str, to: str, timeout_s: float = 60) -> Answer:
        """The operator's move of a session to the worker at the URL `to`; the answer, whatever its status."""
        path = f"/v1/sessions/{quote(sid, safe='')}/move"
        return self.http.call("POST", path, {"to": to}, timeout_s=timeout_s)

    def metrics(self) -> str:
        return self.http.get("/metrics").text

    @property
    def process(self) -> Process:
        assert self._process, f"{self.name} was not started"
        return self._process

    def stop(self) -> None:
        if self._process:
            self._process.stop()
