"""usage: replay.py [--scale 16] [--think 0.01]

Called by scripts/demo.sh. One prefill worker, two decode workers (real SGLang on CPU with a tiny model) and the router serve
the recorded agent sessions of demo/traces, all at once, each turn after the one before it. Then a plain SGLang server,
without any cache, answers every prompt again. In a second act (moves.py) a live session is moved, a worker drained and
restarted, another killed. Exit status 0 means: every answer is the plain server's, token by token.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "engine"))

from fleet import Fleet  # noqa: E402
from harness.module import Worker  # noqa: E402
from harness.oracle import Oracle  # noqa: E402
from harness.process import StartError  # noqa: E402
from harness.router import Router  # noqa: E402
from harness.traces import Trace  # noqa: E402
from moves import second_act  # noqa: E402

THINK_MAX_S = 1.0


@dataclass
class Result:
    """One answered turn."""

    what: str
    prompt: list[int]
    tokens: list[int]
    mode: str
    first_s: float


@dataclass
class Run:
    """What has happened so far; shared by the sessions' threads."""

    turns: int
    results: list[Result] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)
    began: float = field(default_factory=time.monotonic)

    def add(self, result: Result) -> None:
        with self.lock:
            self.results.append(result)

    def modes(self) -> Counter:
        return Counter(r.mode for r in self.results)

    def progress(self) -> str:
        with self.lock:
            modes = " ".join(f"{mode} {n}" for mode, n in sorted(self.modes().items()))
            return f"  {time.monotonic() - self.began:5.0f} s  {len(self.results)}/{self.turns} turns  {modes}"


def play(trace: Trace, router: Router, run: Run, think: float) -> None:
    """One session, closed loop: think, ask, wait for the answer. Every turn is streamed, to time the first token."""
    for i, turn in enumerate(trace.turns):
        time.sleep(min(THINK_MAX_S, turn.think_s * think))
        prompt = trace.prompt(turn)
        reply = router.stream(prompt, n=trace.new_tokens(turn), headers={"x-session-id": trace.sid})
        trace.answered(reply.tokens)
        run.add(Result(f"{trace.sid} turn {i}", prompt, reply.tokens, reply.headers["x-kvc-mode"], reply.first_s))


def report_while(run: Run, stop: Event) -> None:
    """A line every few seconds; rewritten in place on a terminal."""
    place = sys.stdout.isatty()
    while not stop.wait(1 if place else 5):
        print(run.progress(), end="\r" if place else "\n", flush=True)
    print(run.progress(), flush=True)


def percentile(values: list[float], p: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[int(p) - 1]


def table(run: Run, workers: list[Worker], forwarded: int, same: int, ties: int) -> None:
    results = run.results
    prompt_tokens = sum(len(r.prompt) for r in results)
    first = [r.first_s * 1e3 for r in results]
    p50, p90, p99 = (percentile(first, p) for p in (50, 90, 99))
    total = {name: sum(w.metrics().get(name, 0) for w in workers) for name in (MOVED, EVICTED)}
    modes = ", ".join(f"{mode} {100 * n / len(results):.1f} %" for mode, n in run.modes().most_common())
    rows = [
        ("requests", f"{len(results)} of {len({r.what.split()[0] for r in results})} sessions"),
        ("execution modes", modes),
        ("prompt tokens", f"{prompt_tokens:,}, of which computed {forwarded:,}"),
        ("cached-token share", f"{100 * (1 - forwarded / prompt_tokens):.1f} %"),
        ("time to first token", f"p50 {p50:.0f} ms, p90 {p90:.0f} ms, p99 {p99:.0f} ms"),
        ("KV bytes moved", f"{total[MOVED] / 2**20:.1f} MiB"),
        ("evictions", f"{total[EVICTED]:.0f} sessions"),
    ]  # fmt: skip
    print()
    for name, value in rows:
        print(f"  {name:22}{value}")
    tied = f" ({ties} up to a near-tie of the model)" if ties else ""
    print(f"  tokens identical to one plain SGLang server: {same}/{len(results)}{tied}")


MOVED, EVICTED = "kvc_import_bytes_sum", "kvc_evictions_total"


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--scale", type=int, default=16, help="divide the traces' token counts by this (1 to 64)")
    ask.add_argument("--think", type=float, default=0.01, help=f"think-time factor; capped at {THINK_MAX_S} s")
    args = ask.parse_args()
    traces = [Trace.load(path, args.scale) for path in sorted((HERE / "traces").glob("*.json.gz"))]
    turns = sum(len(t.turns) for t in traces)
    scales = f"token counts / {args.scale}, think times / {1 / args.think:.0f}"
    print(f"  {len(traces)} recorded sessions, {turns} turns; {scales}")
    print("  starting 1 prefill and 2 decode workers, a plain server for comparison, and the router", flush=True)
    fleet = Fleet(append=8192 // args.scale)
    try:
        fleet.start()
        wrong = first_act(fleet, traces, Run(turns), args.think)
        same, asked, more = second_act(fleet)
        print(f"\n  tokens identical {same}/{asked}")
        for line in [*wrong, *more][:5]:
            print(f"  differs: {line}")
        return 1 if wrong or same < asked else 0
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        fleet.stop()


def first_act(fleet: Fleet, traces: list[Trace], run: Run, think: float) -> list[str]:
    """Replays the traces and shows the table; lines about answers that differ."""
    print("  replaying", flush=True)
    run.began = time.monotonic()
    stop = Event()
    reporter = Thread(target=report_while, args=(run, stop))
    reporter.start()
    try:
        with ThreadPoolExecutor(len(traces)) as pool:
            for future in [pool.submit(play, trace, fleet.router, run, think) for trace in traces]:
                future.result()
    finally:
        stop.set()
        reporter.join()
    forwarded = fleet.computed()
    print("  asking the plain server for all answers", flush=True)
    oracle = Oracle(fleet.plain)
    for r in run.results:
        oracle.tokens(r.prompt, r.tokens, fleet.plain.generate(r.prompt, n=len(r.tokens)).tokens, r.what)
    table(run, fleet.workers, forwarded, len(run.results) - len(oracle.wrong), oracle.ties)
    return oracle.wrong


if __name__ == "__main__":
    sys.exit(main())
