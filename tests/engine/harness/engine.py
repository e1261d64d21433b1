"""A real SGLang server on CPU with the tiny model, in one of three kinds, and what the tests ask it."""

import signal
from dataclasses import dataclass, field

from .http import Answer, Client
from .process import MODEL, PYTHON, Process, free_port

READY_S = 240.0
# The defaults need Triton, flashinfer, xgrammar and CUDA streams; float32: see scripts/engine/tiny_model.py. The memory
# fraction only keeps SGLang's own estimate, made for GPUs, from overruling --max-total-tokens.
ON_CPU = [
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--disable-overlap-schedule", "--dtype", "float32", "--random-seed", "0",
    "--mem-fraction-static", "0.95", "--skip-server-warmup", "--log-level", "info",
]  # fmt: skip
KINDS = {
    "plain": ["--disable-radix-cache"],
    "radix": [],
    "python": ["--enable-streaming-session"],
    "rust": ["--session-aware-cache=rust"],
}
GREEDY = {"temperature": 0, "ignore_eos": True}


@dataclass
class Reply:
    """A finished `/generate`."""

    tokens: list[int]
    meta: dict
    headers: dict[str, str] = field(default_factory=dict)
    first_s: float = 0.0
    total_s: float = 0.0

    @property
    def cached(self) -> int:
        return self.meta["cached_tokens"]


class Generate:
    """`/generate` as engines and the router answer it."""

    http: Client

    def generate(self, ids, session=None, n=8, headers=None, timeout_s=120, **body) -> Reply:
        """Greedy, `n` new tokens; `session` by the native body field."""
        return reply(
            self.http.post("/generate", self.body(ids, session, n, **body), headers=headers, timeout_s=timeout_s)
        )

    def stream(self, ids, session=None, n=8, headers=None, timeout_s=120, **body) -> Reply:
        """The same, streamed; the tokens put together again from the events."""
        events = self.http.stream("/generate", self.body(ids, session, n, stream=True, **body), headers, timeout_s)
        tokens: list[int] = []
        last: dict = {}
        try:
            for last in events:
                if "error" in last:
                    raise RuntimeError(f"error event: {last['error']}")
                tokens = last["output_ids"]  # each event carries all tokens so far
        finally:
            events.close()
        return Reply(tokens, last["meta_info"], events.headers, events.first_s or 0.0)

    @staticmethod
    def body(ids, session=None, n=8, sampling=None, **more) -> dict:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": n, **GREEDY, **(sampling or {})}, **more}
        return body if session is None else {**body, "session_params": {"id": session}}


class Engine(Generate):
    """A server process. Made with `start` (returns at once) and `ready` (waits)."""

    def __init__(
        self, name: str, kind: str, pool=65536, running=16, page=1, chunk=512, sleepy=True, flags=(), env=None
    ):
        self.name, self.kind, self.pool, self.page, self.running = name, kind, pool, page, running
        self.port = free_port()
        self.http = Client(self.port)
        self.command = [
            PYTHON, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", MODEL, "--host", "127.0.0.1",
            "--port", self.port, *ON_CPU, "--max-total-tokens", pool, "--max-running-requests", running,
            "--page-size", page, "--chunked-prefill-size", chunk, *KINDS[kind], *flags,
        ]  # fmt: skip
        if sleepy:  # an idle engine's loop spins otherwise, and takes a core from the others
            self.command.append("--sleep-on-idle")
        self.env = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "OMP_NUM_THREADS": "1",
            "KVC_TEST": "1" if kind == "rust" else "0",
            **(env or {}),
        }
        self._process: Process | None = None

    def start(self) -> "Engine":
        self._process = Process(self.name, self.command, self.env)
        return self

    def ready(self) -> "Engine":
        self.process.wait_until(self.healthy, READY_S)
        return self

    def healthy(self) -> bool:
        try:
            return self.http.get("/health", timeout_s=5).status == 200
        except OSError:
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> Process:
        assert self._process, f"{self.name} was not started"
        return self._process

    def alive(self) -> bool:
        return self.process.alive()

    def stop(self) -> None:
        if self._process:
            self._process.stop(grace_s=0)  # nothing of it is kept

    def kill(self) -> None:
        """kill -9, the whole group; returns when it is gone."""
        self.process.signal(signal.SIGKILL)
        self.process.popen.wait()

    def restart(self) -> None:
        """At the same address; waits until it is ready."""
        self.stop()
        start_all(self)

    def flush(self) -> None:
        self.http.post("/flush_cache")

    def leak_reports(self) -> list[str]:
        """Lines of the engine's own memory checkers; there must be none."""
        marks = ("leak detected", "Leak Detected", "Scheduler hit an exception")
        return [line for line in self.process.text().splitlines() if any(mark in line for mark in marks)]


def reply(answer: Answer) -> Reply:
    body = answer.json
    return Reply(body["output_ids"], body["meta_info"], answer.headers, total_s=answer.seconds)


def start_all(*engines: Engine) -> None:
    """Starts them together: the start is mostly imports, and two cores share it well enough."""
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.ready()
