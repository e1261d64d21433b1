"""The demo's second act, called by replay.py: six sessions go on while one of them is moved in the middle of an answer, a worker
is drained and restarted, and the other is killed. Ends with what happened to each session."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Thread

from fleet import Fleet, short
from harness.http import HttpError
from harness.module import Worker
from harness.oracle import Oracle
from harness.talk import Talk
from harness.waiting import until

SESSIONS, FIRST, APPEND, ANSWER, THINK_S = 6, 500, 30, 24, 0.6
MOST = 1200  # then the client cuts its history back: all six sessions fit into one worker


@dataclass
class Line:
    """One thing that happened to a session."""

    at: float
    what: str
    where: str
    computed: int | None = None
    reused: int | None = None
    turns: int = 1


@dataclass
class Life:
    """One session and its timeline."""

    talk: Talk
    began: float
    lines: list[Line] = field(default_factory=list)
    worker: Worker | None = None
    answered: int = 0

    def note(self, what: str, where: str = "") -> None:
        self.add(Line(time.monotonic() - self.began, what, where))

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self.lines.sort(key=lambda line: line.at)  # an answer is noted once it has been compared

    def turn(self, fleet: Fleet, again: bool) -> None:
        """Asks once; `again`: the same prompt, after its answer broke off."""
        if len(self.talk.history) > MOST:
            self.talk.rewrite(len(self.talk.history) - FIRST)
        prompt = self.talk.history if again else self.talk.say(APPEND if self.talk.history else FIRST)
        before = fleet.computed(self.talk.sid)
        reply = self.talk.ask(n=ANSWER, stream=True)
        computed = fleet.computed(self.talk.sid) - before
        mode, source = reply.headers["x-kvc-mode"], reply.headers.get("x-kvc-source")
        what = f"{mode} from {source}" if source and mode != "direct" else mode
        worker, self.answered = fleet.named(reply.headers), self.answered + 1
        last = self.lines[-1] if self.lines else None
        if last and last.what == what == "direct" and worker is self.worker and last.computed is not None:
            last.turns, last.computed = last.turns + 1, last.computed + computed
            last.reused = (last.reused or 0) + max(0, len(prompt) - computed)
        else:
            reused = max(0, len(prompt) - computed)  # a seed's last token is computed twice
            self.add(Line(self.talk.answered - self.began, what, short(worker), computed, reused))
        self.worker = worker

    def show(self) -> None:
        print(f"\n  session {self.talk.sid}: {self.answered} turns")
        for line in self.lines:
            what = line.what if line.turns == 1 else f"{line.what}, {line.turns} turns"
            row = f"    {line.at:6.1f} s  {what:34}{line.where:22}"
            if line.computed is not None:
                row += f"computed {line.computed:5,}  reused {line.reused:7,}"
            print(row.rstrip())


def second_act(fleet: Fleet) -> tuple[int, int, list[str]]:
    """Plays it; (answers that are the plain server's, answers, lines about those that are not)."""
    print("\n  second act: six sessions; a live move, a drain with restart, a kill", flush=True)
    oracle = Oracle(fleet.plain)
    began = time.monotonic()
    lives = [Life(Talk(fleet.router, fleet.plain, oracle, f"s{i}"), began) for i in range(1, SESSIONS + 1)]
    over = Event()
    with ThreadPoolExecutor(SESSIONS) as pool:
        playing = [pool.submit(play, fleet, life, over) for life in lives]
        reporter = Thread(target=report_while, args=(lives, over, began))
        reporter.start()
        try:
            wait_turns(lives, 2)
            move_one(fleet, lives)
            wait_turns(lives, 2)
            drain_one(fleet, lives, fleet.decodes[0])
            wait_turns(lives, 2)
            kill_one(fleet, lives, fleet.decodes[1])
            wait_turns(lives, 2)
        finally:
            over.set()
            reporter.join()
        for future in playing:
            future.result()
    for life in lives:
        life.show()
    return oracle.turns - len(oracle.wrong), oracle.turns, oracle.wrong


def play(fleet: Fleet, life: Life, over: Event) -> None:
    """A client: think, ask, ask the same again if the answer broke off."""
    again = False
    while not over.is_set():
        try:
            life.turn(fleet, again)
            again = False
        except (RuntimeError, HttpError, OSError) as error:
            life.note(f"answer broke off: {str(error)[:60]}", short(life.worker) if life.worker else "")
            if again:
                raise
            again = True
            continue
        over.wait(THINK_S)


def wait_turns(lives: list[Life], more: int) -> None:
    """Until each session has had `more` turns."""
    want = [life.answered + more for life in lives]
    until(lambda: all(life.answered >= w for life, w in zip(lives, want, strict=True)), 60)


def move_one(fleet: Fleet, lives: list[Life]) -> None:
    """A session changes its worker while an answer of it streams."""
    life = lives[0]
    assert life.worker
    source, target = life.worker, fleet.other(life.worker)
    until(lambda: (source.session(life.talk.sid) or {}).get("state") == "running")
    say(f"moving {life.talk.sid} from {short(source)} to {short(target)} while it streams")
    answer = fleet.router.move(life.talk.sid, target.url)
    assert answer.status == 200, answer.text
    got = answer.json
    life.note(
        f"moved: {got['pulled_tokens']:,} tokens in {got['micros'] / 1e3:.0f} ms", f"{short(source)} → {short(target)}"
    )


def drain_one(fleet: Fleet, lives: list[Life], leaving: Worker) -> None:
    """A worker hands over what it has and is restarted."""
    there = [life for life in lives if life.worker is leaving]
    say(f"draining {short(leaving)}, where {len(there)} of the sessions live")
    for life in there:
        life.note("its worker is drained", short(leaving))
    answer = leaving.drain(30000)
    assert answer["drained"] and not answer["owned"], answer
    say(f"drained: {answer['moved']} sessions moved; restarting {short(leaving)}")
    leaving.restart()
    until(lambda: fleet.router.knows(leaving), 30)


def kill_one(fleet: Fleet, lives: list[Life], victim: Worker) -> None:
    """kill -9 while it streams; the sessions go on from the replicas of the prefill worker."""
    there = [life for life in lives if life.worker is victim]
    for life in there:
        if (view := victim.session(life.talk.sid)) and view["standing"] == "owner":
            until(lambda life=life: (fleet.prefill.session(life.talk.sid) or {}).get("committed"), 15)
    say(f"kill -9 {short(victim)}, where {len(there)} of the sessions live")
    victim.kill()
    for life in there:
        life.note("kill -9 of its worker", short(victim))


def say(what: str) -> None:
    print(f"  {what}", flush=True)


def report_while(lives: list[Life], over: Event, began: float) -> None:
    while not over.wait(5):
        say(f"{time.monotonic() - began:5.0f} s  {sum(life.answered for life in lives)} turns")
