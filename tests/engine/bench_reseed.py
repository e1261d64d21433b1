"""usage: bench_reseed.py [reseed|gap|sync]...

Called by scripts/bench.sh; prints Markdown for docs/bench.md and writes the figures as JSON to .env/logs/bench-NAME.json.
`reseed`: turns that lost their KV, with a replica and without, the same trace in the same run. `gap`: how long a ready
turn waits when its session is handed over, by context size. `sync`: what following costs a direct turn. Real engines
on CPU, one prefill and two decode workers, two routers in front of the same workers: one names backups, one does not.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import script
from harness.engine import Reply, start_all
from harness.module import Worker
from harness.process import LOGS, ROOT
from harness.router import Router
from harness.traces import Trace
from harness.waiting import Background, evict, follows

SCALE, EVERY = 16, 3  # traces divided by; every third turn has lost its KV
SIZES, MOVES = (1_000, 4_000, 16_000), 30
BLOCKS, TURNS, CONTEXT = 6, 20, 4_000
SIDES = ("with replica", "sync off", "no copy kept")
KV_BYTES = 2048  # of a token in the tiny model


@dataclass
class Bed:
    """The engines of a bench."""

    prefill: Worker
    decodes: list[Worker]
    on: Router
    off: Router

    @property
    def workers(self) -> list[Worker]:
        return [self.prefill, *self.decodes]

    def holder(self, sid: str) -> Worker:
        views = ((w, w.session(sid)) for w in self.decodes)
        return next(w for w, view in views if view and view["committed"] and view["standing"] == "owner")

    def other(self, worker: Worker) -> Worker:
        return next(d for d in self.decodes if d is not worker)

    def computed(self) -> int:
        return sum(w.computed() for w in self.workers)


def reseed(bed: Bed) -> dict:
    """Each trace three times, turn by turn: behind the router that syncs; behind the other, where the prefill worker has
    what it computed for the last seed or reseed; and so that nobody has anything. The same sizes, other tokens, so that
    none finds the other's prefixes."""
    seen: dict[str, list[tuple[int, int, float]]] = {side: [] for side in SIDES}
    for path in sorted((ROOT / "demo" / "traces").glob("*.json.gz")):
        sides = []
        for name in SIDES:
            router = bed.on if name == "with replica" else bed.off
            trace = Trace.load(path, SCALE)
            trace.sid += f"-{name.replace(' ', '-')}"
            sides.append((name, router, trace))
        for i in range(len(sides[0][2].turns)):
            for name, router, trace in sides if i % 2 else sides[::-1]:
                reply, prompt, computed = reseeded(bed, router, trace, i)
                if i and i % EVERY == 0 and reply.headers["x-kvc-mode"] == "reseed":
                    seen[name].append((prompt, computed, reply.first_s * 1e3))
    print(
        "| reseeded turns | n | prompt tokens | prefilled tokens | TTFT p50 ms | p99 ms |\n|---|---:|---:|---:|---:|---:|"
    )
    out: dict = {}
    for name, rows in seen.items():
        first = [r[2] for r in rows]
        out[name] = {
            "turns": len(rows), "prompt_tokens": sum(r[0] for r in rows), "prefilled_tokens": sum(r[1] for r in rows),
            "ttft_ms": {"p50": percentile(first, 50), "p99": percentile(first, 99)},
        }  # fmt: skip
        o = out[name]
        print(
            f"| {name} | {o['turns']} | {o['prompt_tokens']:,} | {o['prefilled_tokens']:,} "
            f"| {o['ttft_ms']['p50']:.0f} | {o['ttft_ms']['p99']:.0f} |",
            flush=True,
        )
    return out


def reseeded(bed: Bed, router: Router, trace: Trace, i: int) -> tuple[Reply, int, int]:
    """Plays turn `i`, every third after an eviction at its worker: the reply, its prompt tokens, and those computed for it."""
    turn = trace.turns[i]
    prompt = trace.prompt(turn)
    if i and i % EVERY == 0:
        holder = bed.holder(trace.sid)
        if router is bed.on:
            follows(bed.prefill, holder, trace.sid, 60)
        evict(holder, trace.sid)
        if trace.sid.endswith(SIDES[2].replace(" ", "-")):
            evict(bed.prefill, trace.sid)
    bed.computed()
    reply = router.stream(prompt, n=trace.new_tokens(turn), headers={"x-session-id": trace.sid})
    computed = bed.computed()
    trace.answered(reply.tokens)
    return reply, len(prompt), computed


def gap(bed: Bed) -> dict:
    """A turn is sent at a random moment of a prepared move; the gap is its time to first token beyond the median of direct
    turns of that session that meet no move. `moved under it`: the answer came from the target. No attention, see `bed`."""
    print("| context | direct TTFT p50 ms | gap p50 ms | gap p99 ms | moved under it | move p50 ms |")
    print("|---|---:|---:|---:|---:|---:|")
    out: dict = {}
    for size in SIZES:
        rnd, sid = random.Random(size), f"gap-{size}"
        history = script.ids(rnd, size)

        def turn(sid=sid, rnd=rnd) -> tuple[float, Worker]:
            nonlocal history
            reply = bed.off.stream(history, sid, n=2)
            history = history + reply.tokens + script.ids(rnd, 8)
            return reply.first_s * 1e3, next(w for w in bed.decodes if w.url.endswith(reply.headers["x-kvc-worker"]))

        turn()
        for _ in range(2):  # both decode workers have had it: a move pulls only what is new
            assert bed.off.move(sid, bed.other(bed.holder(sid)).url).status == 200
            turn()
        usual, under = statistics.median(turn()[0] for _ in range(MOVES)), 0
        waits: list[float] = []
        moves: list[float] = []
        for _ in range(MOVES):
            target = bed.other(bed.holder(sid))
            move = Background(bed.off.move, sid, target.url)
            time.sleep(rnd.random() * (statistics.median(moves) if moves else 20) / 1e3)
            first, where = turn()
            answer = move.done()
            assert answer.status == 200, answer.text
            waits.append(max(0.0, first - usual))
            moves.append(answer.seconds * 1e3)
            under += where is target
        out[size] = {
            "direct_ttft_p50_ms": usual, "gap_ms": {"p50": percentile(waits, 50), "p99": percentile(waits, 99)},
            "under": under, "moves": MOVES, "move_p50_ms": percentile(moves, 50),
        }  # fmt: skip
        o = out[size]["gap_ms"]
        print(
            f"| {size:,} | {usual:.1f} | {o['p50']:.1f} | {o['p99']:.1f} | {under} of {MOVES} | {percentile(moves, 50):.0f} |",
            flush=True,
        )
    return out


def sync(bed: Bed) -> dict:
    """Direct turns of two sessions of equal size on the same worker, block by block in turn: one has a replica that
    follows, the other has none. CPU: user and system time of all three engines, as a share of one core."""
    sides = {}
    for name, router in (("on", bed.on), ("off", bed.off)):
        rnd, sid = random.Random(name), f"sync-{name}"
        history = script.ids(rnd, CONTEXT)
        history += router.generate(history, sid, n=2).tokens + script.ids(rnd, 16)
        sides[name] = (router, sid, rnd, history)
    on, off = (bed.holder(sides[name][1]) for name in ("on", "off"))
    if on is not off:
        assert bed.off.move("sync-off", on.url).status == 200
    first: dict[str, list[float]] = {"on": [], "off": []}
    cpu: dict[str, list[float]] = {"on": [], "off": []}
    for block in range(BLOCKS):
        for name in ("on", "off") if block % 2 else ("off", "on"):
            router, sid, rnd, history = sides[name]
            before, began = sum(w.process.cpu_s() for w in bed.workers), time.monotonic()
            for _ in range(TURNS):
                reply = router.stream(history, sid, n=8)
                assert reply.headers["x-kvc-mode"] == "direct", reply.headers
                first[name].append(reply.first_s * 1e3)
                history = history + reply.tokens + script.ids(rnd, 16)
                time.sleep(0.05)  # the pull of one turn falls beside the next one at most
            spent = sum(w.process.cpu_s() for w in bed.workers) - before
            cpu[name].append(spent / (time.monotonic() - began))
            sides[name] = (router, sid, rnd, history)
    ratio = statistics.median(a / b for a, b in zip(first["on"], first["off"], strict=True))
    out: dict = {
        "turns": len(first["on"]), "ttft_p50_ms": {k: statistics.median(v) for k, v in first.items()},
        "ttft_ratio_median": ratio, "cpu_share": {k: statistics.median(v) for k, v in cpu.items()},
        "replica_bytes": bed.prefill.view("sync-on")["committed"] * KV_BYTES,
    }  # fmt: skip
    print("| sync | turns | TTFT p50 ms | CPU, share of a core |\n|---|---:|---:|---:|")
    for name in ("off", "on"):
        print(f"| {name} | {out['turns']} | {out['ttft_p50_ms'][name]:.1f} | {100 * out['cpu_share'][name]:.0f} % |")
    print(
        f"\nMedian of the paired TTFT ratios on / off: {ratio:.3f}. The replica: {out['replica_bytes'] / 2**20:.1f} MiB of KV."
    )
    return out


def percentile(values: list[float], p: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[p - 1] if len(values) > 1 else (values or [0.0])[0]


@contextmanager
def bed(attention: bool) -> Iterator[Bed]:
    """Engines of release builds, stopped at the end. Without attention a turn costs next to nothing, and what waits for a
    hand-over or a sync shows; on CPU attention over 16,000 tokens would hide it."""
    env = {} if attention else {"KVC_BENCH_OUT": "/dev/null", "PYTHONPATH": str(Path(__file__).parent / "bench_site")}
    kw: dict[str, Any] = dict(
        append=8192 // SCALE, page=16, chunk=2048, flags=["--max-prefill-tokens", "16384"], env=env
    )
    prefill = Worker("bench-prefill", role="prefill", pool=65536, **kw)
    decodes = [Worker(f"bench-decode{i}", role="decode", pool=49152, **kw) for i in (1, 2)]
    workers = [(w.role, w.url) for w in (prefill, *decodes)]
    on = Router("bench-on", workers, release=True)
    off = Router("bench-off", workers, ["--sync=false"], release=True)
    try:
        start_all(prefill, *decodes)
        on.start()
        off.start()
        yield Bed(prefill, decodes, on, off)
    finally:
        for router in (on, off):
            router.stop()
        for worker in (prefill, *decodes):
            worker.stop()


BENCHES = {"reseed": (reseed, True), "gap": (gap, False), "sync": (sync, True)}


def main(names: list[str]) -> None:
    for name in names:
        figures, attention = BENCHES[name]
        with bed(attention) as made:
            print(f"\n### {name}\n", flush=True)
            Path(LOGS / f"bench-{name}.json").write_text(json.dumps(figures(made), indent=1) + "\n")


if __name__ == "__main__":
    if set(sys.argv[1:]) - set(BENCHES):
        sys.exit(__doc__)
    main(sys.argv[1:] or list(BENCHES))
