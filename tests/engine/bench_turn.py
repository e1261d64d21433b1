"""usage: bench_turn.py turns|admission

Called by scripts/bench.sh; prints Markdown for docs/bench.md. `turns`: what the scheduler thread spends in its prefix cache
per turn of a session of 30,000 tokens. `admission`: round trips of `/admit_direct_append` beside a bare echo server.
"""

import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import script
from harness.engine import Engine, start_all
from harness.module import Worker, question
from harness.process import LOGS

CONTEXT, TURNS = 30_000, 20
BIG = ["--max-prefill-tokens", "16384"]


def turns() -> None:
    """Median microseconds per turn, by cache and by the way the history comes."""
    print("| cache | request | µs per turn | of which |\n|---|---|---:|---|\n", end="")
    plan = [
        ("Python session cache", "python", True),
        ("kvc", "rust", True),
        ("radix cache", "radix", False),
        ("kvc", "rust", False),
    ]
    for name, kind, streaming in plan:
        out = LOGS / f"bench-{kind}-{streaming}.jsonl"
        out.unlink(missing_ok=True)
        env = {"KVC_BENCH_OUT": str(out), "PYTHONPATH": str(Path(__file__).parent / "bench_site"), "KVC_TEST": "0"}
        env["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"
        engine = Engine(f"bench-{kind}", kind, pool=65536, chunk=8192, sleepy=False, env=env, flags=BIG)
        try:
            start_all(engine)
            session_turns(engine, streaming)
        finally:
            engine.stop()
        rows = [json.loads(line) for line in out.read_text().splitlines()][-TURNS:]
        parts = {m: statistics.median(r.get(m, 0.0) for r in rows) for m in rows[-1]}
        total = statistics.median(sum(r.values()) for r in rows)
        what = ", ".join(f"{m} {v:.0f}" for m, v in parts.items() if v >= 0.5)
        print(f"| {name} | {'streaming session' if streaming else 'full history'} | {total:.0f} | {what} |", flush=True)


def session_turns(engine: Engine, streaming: bool) -> None:
    rnd = random.Random(1)
    history = script.ids(rnd, CONTEXT)
    sid = None if engine.kind == "radix" else "bench"
    if streaming:
        engine.http.post("/open_session", {"capacity_of_str_len": 10**7, "session_id": sid, "streaming": True})
    delta = history
    for _ in range(TURNS + 1):
        reply = engine.generate(delta if streaming else history, sid, n=8)
        delta = script.ids(rnd, 64)
        history = history + reply.tokens + delta


ECHO = """
import socket, threading
s = socket.create_server(("127.0.0.1", {port}))
def serve(c):
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while c.recv(65536): c.sendall({answer!r})
while True: threading.Thread(target=serve, args=(s.accept()[0],), daemon=True).start()
"""


class Asker:
    """One keep-alive connection that asks again and again; a socket and nothing else, so that both servers pay the same."""

    def __init__(self, port: int, body: Callable[[], bytes]):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.body = body

    def ask(self) -> float:
        data = self.body()
        head = f"POST /admit_direct_append HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        head += "content-type: application/json\r\n\r\n"
        begin = time.perf_counter()
        self.socket.sendall(head.encode() + data)
        if not self.socket.recv(65536):
            raise ConnectionError("closed")
        return time.perf_counter() - begin


def admission() -> None:
    print("| situation | server | n | p50 µs | p99 µs | max µs |\n|---|---|---:|---:|---:|---:|")
    for sleeping in (False, True):
        worker = Worker("bench-admit", pool=65536, chunk=16384, sleepy=sleeping, flags=BIG, env={"KVC_TEST": "0"})
        echo = None
        try:
            start_all(worker)
            asked = lambda: json.dumps(question("admit", 50, append_tokens=10)).encode()  # noqa: E731
            sample = worker.listener.call("POST", "/admit_direct_append", asked())
            from harness.process import free_port

            port = free_port()
            answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(sample.body) + sample.body
            echo = subprocess.Popen([sys.executable, "-c", ECHO.format(port=port, answer=answer)])
            time.sleep(0.5)
            for name, work in situations(worker, sleeping):
                askers = [Asker(at, asked) for at in (worker.listener.port, port)]
                for server, times in zip(("kvc", "echo"), while_busy(askers, work), strict=True):
                    seconds = sorted(times)
                    p = [seconds[int(len(seconds) * q)] * 1e6 for q in (0.5, 0.99)]
                    print(
                        f"| {name} | {server} | {len(seconds)} | {p[0]:.0f} | {p[1]:.0f} | {seconds[-1] * 1e6:.0f} |",
                        flush=True,
                    )
        finally:
            worker.stop()
            if echo:
                echo.kill()


def situations(worker: Worker, sleeping: bool) -> list[tuple[str, Callable[[], list]]]:
    """(name, calls to run meanwhile); no calls: two seconds of quiet."""
    rnd = random.Random(2)
    if sleeping:
        return [("idle, --sleep-on-idle", list)]
    cached = script.ids(rnd, 12_000)
    worker.generate(cached, "cached", n=2)

    def decode(i: int) -> None:
        worker.generate(script.ids(random.Random(i), 200), n=200)

    return [
        ("idle, spinning loop", list),
        ("prefill of 12,000 tokens", lambda: [lambda: worker.generate(script.ids(rnd, 12_000), n=1)]),
        ("eight decodes", lambda: [lambda i=i: decode(i) for i in range(8)]),
        (
            "cached turns of 12,000 tokens",
            lambda: [lambda: [worker.generate(cached, "cached", n=2) for _ in range(20)]],
        ),
    ]


def while_busy(askers: list[Asker], work: Callable[[], list]) -> list[list[float]]:
    """Round trips to each in turn, 2 ms apart, while the calls run."""
    calls = work()
    seconds: list[list[float]] = [[] for _ in askers]
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        futures = [pool.submit(call) for call in calls]
        time.sleep(0.1)
        end = time.monotonic() + 2
        while any(not f.done() for f in futures) if futures else time.monotonic() < end:
            for asker, times in zip(askers, seconds, strict=True):
                times.append(asker.ask())
                time.sleep(0.002)
        for future in futures:
            future.result()
    return seconds


if __name__ == "__main__":
    if sys.argv[1:] not in (["turns"], ["admission"]):
        sys.exit(__doc__)
    {"turns": turns, "admission": admission}[sys.argv[1]]()
