"""What a worker with `--session-aware-cache=rust` tells beyond SGLang: the module's HTTP surface, and the KVC_TEST routes
that read the engine's own state and tensors from inside its scheduler."""

import itertools
import random
import time
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote

from . import script
from .engine import Engine
from .http import Answer, Client


class Worker(Engine):
    """A rust-mode engine."""

    def __init__(self, name: str, role: str = "both", append: int = 8192, **kw):
        flags = [*kw.pop("flags", ()), "--kvcache-direct-max-uncached-tokens", append]
        env = {"KVC_ROLE": role, "KVC_CHECKSUM": "true", **kw.pop("env", {})}
        super().__init__(name, "rust", flags=flags, env=env, **kw)
        self.role, self.append = role, append

    def start(self) -> "Worker":
        self.__dict__.pop("info", None)  # a new process has another incarnation and other ports
        self.__dict__.pop("listener", None)
        super().start()
        return self

    # the module's listener

    @cached_property
    def info(self) -> dict:
        return self.http.get("/kvc/v1/info").json

    @cached_property
    def listener(self) -> Client:
        """The module's own listener; answers without the scheduler loop (ADM-11)."""
        return Client(int(self.info["listen"].rpartition(":")[2]))

    def admit(self, **question) -> Answer:
        return self.listener.call("POST", "/admit_direct_append", question)

    def session(self, sid: str) -> dict | None:
        answer = self.listener.get(f"/kvc/v1/sessions/{sid}")
        return answer.json if answer.status == 200 else None

    def view(self, sid: str) -> dict:
        """The session, which must be known."""
        view = self.session(sid)
        assert view, f"{self.name} does not know {sid}"
        return view

    def release(self, sid: str, **body) -> Answer:
        return self.listener.call("POST", f"/kvc/v1/sessions/{sid}/release", body)

    def transfers(self) -> dict:
        """Running imports, live leases, and what is still to be synced."""
        return self.listener.get("/kvc/v1/transfers").json

    def imports(self, sid: str) -> list[dict]:
        """The running imports of one session."""
        return [i for i in self.transfers()["imports"] if i["session_id"] == sid]

    @property
    def peer(self) -> dict[str, str]:
        """How its peers reach this process."""
        return {"peer": self.info["peer"], "incarnation": self.info["incarnation"]}

    def import_(self, sid: str, source: "Worker", placement: dict, kind: str = "owner", **more) -> Answer:
        """An import without a reservation: a move (`owner`) or a copy (`replica`); the answer, whatever its status."""
        body = {"source": kind, "placement": placement, **source.peer, "deadline_ms": 20000, **more}
        return self.listener.call("POST", f"/kvc/v1/sessions/{quote(sid, safe='')}/import", body)

    def withdraw(self, sid: str, placement: dict) -> Answer:
        body = {"placement": placement, "incarnation": self.info["incarnation"]}
        return self.listener.call("POST", f"/kvc/v1/sessions/{quote(sid, safe='')}/withdraw", body)

    def drain(self, deadline_ms: int = 30000, draining: bool = True) -> dict:
        """MIG-4; answered when nothing is left, or at the deadline."""
        body = {"deadline_ms": deadline_ms, "draining": draining}
        return self.listener.post("/kvc/v1/drain", body, timeout_s=deadline_ms / 1e3 + 10).json

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by `name{labels}`."""
        out = {}
        for line in self.listener.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                out[name] = float(value)
        return out

    # KVC_TEST=1

    def test(self, what: str, **body):
        return self.http.post(f"/kvc/test/{what}", body).json

    def state(self) -> dict:
        """The engine's ledger, answered by the scheduler between two steps."""
        return self.test("state")

    def settled(self, deadline_s: float = 10) -> dict:
        """The state once nothing runs, waits or lands."""
        until = time.monotonic() + deadline_s
        while True:
            state = self.state()
            busy = state["running"] or state["waiting"] or state["landing"]
            if not busy and state["rows_free"] == state["rows"]:  # a chunked prefill is in a row and in no list
                return state
            assert time.monotonic() < until, f"{self.name} did not come to rest: {state}\n{self.process.tail()}"
            time.sleep(0.1)

    def forwards(self) -> list[dict]:
        """Per request since the last call: tokens that entered the model's forward, and what was said to be reused."""
        return self.test("forwards")

    def computed(self) -> int:
        """Prompt tokens that entered the model since the last look at `forwards`, whoever's."""
        return sum(f["forwarded"] for f in self.forwards())

    def throttle(self, bytes_per_s: int) -> None:
        """Slows what this worker's mover pulls; 0 ends it."""
        self.test("throttle", bytes_per_s=bytes_per_s)

    def kv(self, sid: str, start: int, end: int) -> list[str]:
        """One digest per position over K and V of all layers, read from the engine's tensors."""
        return self.test("kv", session=sid, **{"from": start, "to": end})["digest"]


ROUTER_ID, STORE_ID = "00000000000000aa", "00000000000000bb"
_numbers = itertools.count(1)


def question(sid: str, tokens: int, turn: int = 0, **more) -> dict:
    """A whole admission question, as a router asks it; `more` replaces fields."""
    number = next(_numbers)
    return {
        "session_id": sid, "turn": turn, "input_tokens": tokens, "append_tokens": tokens, "max_new_tokens": 16,
        "router": ROUTER_ID, "request": number, "attempt": 0, **more,
    }  # fmt: skip


def tag(sid: str, reservation=None, placement=None, prefill=False) -> dict[str, str]:
    """The X-Kvc-Turn header."""
    parts = [f"s={quote(sid, safe='')}"]
    if reservation is not None:
        parts.append(f"r={reservation}")
    if placement:
        parts.append(f"p={placement['n']}.{placement['store']}")
    return {"x-kvc-turn": ";".join(parts + ["prefill"] * prefill)}


@dataclass
class Seed:
    """What a router does for a seed or reseed, one step at a time, so that a test can act between the steps."""

    source: Worker
    target: Worker
    sid: str
    prompt: list[int]
    turn: int = 0

    def ask(self, **more) -> dict:
        """The admission question under a new placement; its answer."""
        self.placement: dict = {"n": next(_numbers), "store": STORE_ID}
        asked = question(self.sid, len(self.prompt), self.turn, placement=self.placement, **more)
        self.key = {k: asked[k] for k in ("router", "request", "attempt")}
        answer = self.target.admit(**asked).json
        self.reservation = answer.get("reservation")
        return answer

    def admit(self, **more) -> dict:
        answer = self.ask(**more)
        assert answer["can_admit"], answer
        return answer

    def prefill(self) -> None:
        self.source.generate(self.prompt, n=1, headers=tag(self.sid, placement=self.placement, prefill=True))

    def pull(self, **more) -> Answer:
        """The import; its answer, whatever the status."""
        body = {
            "reservation": self.reservation, "placement": self.placement, "peer": self.source.info["peer"],
            "incarnation": self.source.info["incarnation"], "deadline_ms": 20000, **more,
        }  # fmt: skip
        return self.target.listener.call("POST", f"/kvc/v1/sessions/{quote(self.sid, safe='')}/import", body)

    def give_up(self) -> None:
        """As a router whose client went away: ends the grant, which else is charged for 30 s (ADM-10)."""
        self.target.release(self.sid, request=self.key)

    def decode(self, n: int = 8, stream: bool = False):
        call = self.target.stream if stream else self.target.generate
        return call(self.prompt, n=n, headers=tag(self.sid, self.reservation, self.placement))

    def run(self) -> "Seed":
        """Admit, prefill, pull."""
        self.admit()
        self.prefill()
        pulled = self.pull()
        assert pulled.status == 200, pulled.text
        return self


def fill(worker: Worker) -> list[Seed]:
    """Grants to sessions that never come, until a small turn finds no room (ADM-6)."""
    grants: list[Seed] = []
    rnd = random.Random(91)
    for tokens in (4000, 1000, 250, 60):
        while len(grants) < 40:
            seed = Seed(worker, worker, f"fill-{worker.name}-{len(grants)}", script.ids(rnd, tokens))
            if not seed.ask()["can_admit"]:
                break
            grants.append(seed)
    return grants


def assert_balanced(worker: Worker) -> dict:
    """T3: nothing is lost while idle. Every token slot is free, evictable, locked or held; every row is free."""
    state = worker.settled()  # also: no idle session keeps a row (OWN-3)
    total = state["free"] + state["evictable"] + state["protected"] + state["held"]
    assert total == state["pool"], f"{worker.name}: {state}"
    assert worker.alive() and not worker.leak_reports(), worker.process.tail()
    return state
