"""SIGTERM drains before the engine shuts down (MIG-4); a listener of our own stands for the module's."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt.managers.tokenizer_manager")
from kvc.sglang import shutdown


class Listener:
    """Answers a drain when it is let go on."""

    def __init__(self):
        listener = self
        self.asked: list[dict] = []
        self.go_on = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                listener.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                assert self.path == "/kvc/v1/drain"
                listener.go_on.wait(20)
                body = b'{"drained":true,"owned":0,"turns":0,"transfers":0,"moved":3}'
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def listener():
    listener = Listener()
    yield listener
    listener.go_on.set()
    listener.server.shutdown()


def manager(address: str, drain_ms: int) -> SimpleNamespace:
    """As far as signals go."""
    m = SimpleNamespace(
        gracefully_exit=False, rid_to_state={}, _subprocess_watchdog=None, signal_handler_class="the engine's",
        server_args=SimpleNamespace(kvc_listen=address),
    )  # fmt: skip
    shutdown.install(m, drain_ms)
    return m


async def until(condition, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_the_engine_shuts_down_when_the_drain_has_answered_and_not_before(listener):
    async def story():
        m = manager(listener.address, 700)
        m.signal_handler_class(m).sigterm_handler()
        await until(lambda: listener.asked)
        assert listener.asked == [{"deadline_ms": 700, "draining": True}]
        assert not m.gracefully_exit  # still healthy
        listener.go_on.set()
        await until(lambda: m.gracefully_exit)

    asyncio.run(story())


def test_requests_that_were_answered_hold_the_engine_up_no_longer(listener):
    """The engine keeps those aborted in its queue, and waits for them."""

    async def story():
        m = manager(listener.address, 700)
        m.rid_to_state |= {"answered": SimpleNamespace(finished=True), "runs": SimpleNamespace(finished=False)}
        m.signal_handler_class(m).sigterm_handler()
        listener.go_on.set()
        await until(lambda: m.gracefully_exit)
        await until(lambda: list(m.rid_to_state) == ["runs"])
        m.rid_to_state["runs"].finished = True
        await until(lambda: not m.rid_to_state)

    asyncio.run(story())


def test_a_listener_that_never_answers_costs_its_deadline(listener, monkeypatch):
    monkeypatch.setattr(shutdown, "ANSWER_SECONDS", 0.1)

    async def story():
        m = manager(listener.address, 300)
        m.signal_handler_class(m).sigterm_handler()
        await asyncio.sleep(0.2)
        assert not m.gracefully_exit
        await until(lambda: m.gracefully_exit, 5)

    asyncio.run(story())


def test_a_module_that_is_gone_costs_nothing():
    async def story():
        m = manager("127.0.0.1:1", 60_000)
        m.signal_handler_class(m).sigterm_handler()
        await until(lambda: m.gracefully_exit, 5)

    asyncio.run(story())


def test_switched_off_the_engines_own_handler_stays():
    assert manager("127.0.0.1:1", 0).signal_handler_class == "the engine's"


SECOND = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from test_shutdown import manager

async def main():
    import signal
    m = manager(sys.argv[2], 60_000)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, m.signal_handler_class(m).sigterm_handler)
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_second_signal_ends_all_at_once(listener):
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SECOND, os.path.dirname(__file__), listener.address],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        asyncio.run(until(lambda: listener.asked))
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == -signal.SIGKILL
    finally:
        child.kill()
