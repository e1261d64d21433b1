"""The router's binary in front of real workers."""

from .engine import Generate
from .http import Client
from .process import ROOT, Process, free_port

BINARY = ROOT / "target" / "debug" / "kvc-router"


class Router(Generate):
    """A `kvc-router` process. `workers`: (role, url)."""

    def __init__(self, name: str, workers, flags=()):
        self.name, self.port = name, free_port()
        self.http = Client(self.port)
        self.workers = list(workers)
        self.command = [BINARY, "--listen", f"127.0.0.1:{self.port}"]
        for role, url in self.workers:
            self.command += ["--worker", f"role={role},url={url}"]
        self.command += list(flags)
        self._process: Process | None = None

    def start(self) -> "Router":
        assert BINARY.exists(), "build it first: cargo build -p kvc-router"
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

    def state(self) -> dict:
        return self.http.get("/v1/router/state").json

    def metrics(self) -> str:
        return self.http.get("/metrics").text

    @property
    def process(self) -> Process:
        assert self._process, f"{self.name} was not started"
        return self._process

    def stop(self) -> None:
        if self._process:
            self._process.stop()
