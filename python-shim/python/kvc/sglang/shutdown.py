"""SIGTERM: the module hands its sessions over (MIG-4), then the engine shuts down in its own way.

`install` runs in the HTTP server's process. There the engine makes its signal handler from a class that it looks up on
its tokenizer manager, so no patch is needed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from typing import Any

import aiohttp
from sglang.srt.managers.tokenizer_manager import SignalHandler
from sglang.srt.utils import kill_process_tree

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""How long after the drain's own deadline its answer may come."""


def install(manager: Any, drain_ms: int) -> None:
    """`drain_ms` 0 leaves the engine's handler."""
    if drain_ms > 0:
        url = f"http://{manager.server_args.kvc_listen}/kvc/v1/drain"
        manager.signal_handler_class = functools.partial(DrainFirst, url=url, drain_ms=drain_ms)


class DrainFirst(SignalHandler):
    """The engine's handler, after a drain. Until then the server is healthy and serves what runs."""

    def __init__(self, manager: Any, url: str, drain_ms: int) -> None:
        super().__init__(manager)
        self._url = url
        self._drain_ms = drain_ms
        self._shutdown: asyncio.Task[None] | None = None

    def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
        """The first signal drains; a second one, also while the engine finishes its requests, ends all at once."""
        if self._shutdown is None:
            self._shutdown = asyncio.get_running_loop().create_task(self._drain_then_exit(signum, frame))
            return
        log.warning("second SIGTERM: ending now")
        watchdog = self.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        kill_process_tree(os.getpid())

    async def _drain_then_exit(self, signum: Any, frame: Any) -> None:
        log.warning("SIGTERM: draining for up to %d ms, a second SIGTERM ends all at once", self._drain_ms)
        try:
            answer = await self._drain()
            level = logging.INFO if answer.get("drained") is True else logging.WARNING
            log.log(level, "drain: %s", answer)
        except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError) as error:
            log.warning("the module's listener does not drain: %s: %s", type(error).__name__, error)
        finally:
            super().sigterm_handler(signum, frame)
        await self._forget_answered()

    async def _forget_answered(self) -> None:
        """The engine ends when it knows of no request any more, and it keeps those that were aborted in its queue: for
        them it would wait for ever. Their clients have been answered."""
        states = self.tokenizer_manager.rid_to_state
        while True:
            for rid in [rid for rid, state in states.items() if state.finished]:
                del states[rid]
            await asyncio.sleep(1)

    async def _drain(self) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._drain_ms / 1000 + ANSWER_SECONDS)
        body = {"deadline_ms": self._drain_ms, "draining": True}
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(self._url, json=body) as answer:
            return await answer.json()
