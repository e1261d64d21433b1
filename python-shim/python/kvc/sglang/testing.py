"""What tests ask a running engine for: memory numbers, its own KV bytes, what entered its model. Only with KVC_TEST=1.

Routes on the engine's HTTP port, answered by the scheduler between two steps: `POST /kvc/test/OP` with OP one of state,
forwards, kv, corrupt, fail, throttle. Nothing here is imported otherwise.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.io_struct import BaseReq
from sglang.utils import TypeBasedDispatcher

FORWARDS = 4096
"""Requests whose forwards are remembered."""


@dataclass
class TestRequest(BaseReq):
    """A question to the scheduler process."""

    op: str = ""
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class TestAnswer(BaseReq):
    """Its answer."""

    out: Any = None


def install(app: Any, manager: Any) -> None:
    """In the HTTP server's process: the routes."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.managers.tokenizer_communicator_mixin import _Communicator

    ask = _Communicator(manager.send_to_scheduler, manager.server_args.dp_size)
    manager._result_dispatcher += TypeBasedDispatcher([(TestAnswer, ask.handle_recv)])

    async def test(op: str, request: Request) -> Any:
        manager.auto_create_handle_loop()
        body = await request.body()
        args = await request.json() if body else {}
        out = (await ask(TestRequest(op=op, args=args)))[0].out
        return JSONResponse(out, 400 if isinstance(out, dict) and "error" in out else 200)

    app.add_api_route("/kvc/test/{op}", test, methods=["POST"])


def observe(scheduler: Any, hooks: Any) -> None:
    """In the scheduler's process: counts and answers."""
    observer = Observer(scheduler, hooks)
    hooks.cache.observer = observer
    dispatcher = scheduler.init_request_dispatcher

    def init_request_dispatcher() -> None:
        dispatcher()
        scheduler._request_dispatcher += TypeBasedDispatcher([(TestRequest, observer.answer)])

    scheduler.init_request_dispatcher = init_request_dispatcher


class Observer:
    """Keeps for each session the row that its last turn or import left, as the engine itself used it."""

    def __init__(self, scheduler: Any, hooks: Any) -> None:
        self.scheduler = scheduler
        self.hooks = hooks
        self.cache = hooks.cache
        self.rows: dict[str, tuple[list[int], list[int]]] = {}
        self.forwards: dict[str, dict[str, Any]] = {}
        self.order: deque[str] = deque()
        runner = scheduler.tp_worker.model_runner
        forward, run_batch = runner.forward, scheduler.run_batch
        current: list[Any] = [None]

        def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
            current[0] = batch
            return run_batch(batch, *args, **kwargs)

        def counted(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if current[0] is not None:
                self._count(current[0], forward_batch)
            return forward(forward_batch, *args, **kwargs)

        scheduler.run_batch, runner.forward = run, counted

    # Told by the cache.

    def committed(self, sid: str, tokens: list[int], row: torch.Tensor) -> None:
        """A turn ended with this row."""
        self.rows[sid] = (tokens, row.tolist())

    def imported(self, import_id: int, landing: Any, head: torch.Tensor) -> None:
        """An import is about to commit; `head` are the slots of its shared part."""
        sid = self.hooks.engine.session_of(import_id)
        own = self.rows.get(sid, ([], []))[1][landing.have : landing.held]
        slots = landing.head.tolist() + own + landing.slots.tolist()
        slots[: len(head)] = head.tolist()
        self.rows[sid] = (landing.tokens, slots[: len(landing.tokens)])

    def _count(self, batch: Any, forward_batch: Any) -> None:
        extend = batch.forward_mode.is_extend()
        lens = list(batch.extend_lens) if extend else [1] * len(batch.reqs)
        if sum(lens) != forward_batch.input_ids.numel():
            raise AssertionError(f"{sum(lens)} tokens planned, {forward_batch.input_ids.numel()} in the forward")
        for req, tokens in zip(batch.reqs, lens, strict=True):
            seen = self.forwards.get(req.rid)
            if seen is None:
                run = req.kvc
                seen = self.forwards[req.rid] = {
                    "rid": req.rid,
                    "session": None if run is None else run.sid,
                    "prompt": len(req.origin_input_ids),
                    "forwarded": 0,
                    "decoded": 0,
                    "cached": 0 if run is None else run.matched,
                }
                self.order.append(req.rid)
                if len(self.order) > FORWARDS:
                    self.forwards.pop(self.order.popleft(), None)
            seen["forwarded" if extend else "decoded"] += tokens

    # Asked over HTTP.

    def answer(self, request: TestRequest) -> TestAnswer:
        """Answers one question; a wrong one gets `{"error": …}`."""
        if request.op not in ("state", "forwards", "kv", "corrupt", "fail", "throttle"):
            return TestAnswer(out={"error": {"code": "bad-request", "message": f"no test op {request.op!r}"}})
        try:
            return TestAnswer(out=getattr(self, "_" + request.op)(**request.args))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            return TestAnswer(out={"error": {"code": "bad-request", "message": f"{type(error).__name__}: {error}"}})

    def _state(self) -> dict[str, Any]:
        s, cache = self.scheduler, self.cache
        return {
            "pool": s.max_total_num_tokens,
            "free": s.token_to_kv_pool_allocator.available_size(),
            "evictable": cache.evictable_size(),
            "tree_evictable": cache.inner.evictable_size(),
            "protected": cache.protected_size(),
            "held": cache.session_held_tokens(),
            "rows_free": len(s.req_to_token_pool.free_slots),
            "rows": s.req_to_token_pool.size,
            "running": len(s.running_batch.reqs),
            "waiting": len(s.waiting_queue),
            "landing": len(cache.landings),
            "pending": len(cache.pending),
            "handles": len(cache.prefixes),
            "sessions": self.hooks.engine.sessions(),
            "counters": self.hooks.engine.counters(),
        }

    def _forwards(self) -> list[dict[str, Any]]:
        out = [self.forwards[rid] for rid in self.order]
        self.forwards.clear()
        self.order.clear()
        return out

    def _slots(self, session: str) -> tuple[list[int], list[int]]:
        tokens, slots = self.rows[session]
        held = self.hooks.engine.history_len(session)
        return tokens[:held], slots[:held]

    def _kv(self, session: str, **span: int) -> dict[str, Any]:
        tokens, slots = self._slots(session)
        start, end = span.get("from", 0), span.get("to", len(slots))
        digests = [self._digest(slot) for slot in slots[start:end]]
        return {"tokens": tokens[start:end], "slots": slots[start:end], "digest": digests}

    def _digest(self, slot: int) -> str:
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        digest = hashlib.blake2b(digest_size=8)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            digest.update(buffer[slot].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    def _fail(self) -> dict[str, Any]:
        self.hooks.engine.fail()
        return {"faulted": self.hooks.engine.faulted}

    def _throttle(self, bytes_per_s: int) -> dict[str, Any]:
        """All pulls into this worker together, also those under way; 0: no limit."""
        self.hooks.engine.limit_pulls(bytes_per_s)
        return {"bytes_per_s": bytes_per_s}

    def _corrupt(self, session: str, at: int | None = None, swap: list[int] | None = None) -> dict[str, Any]:
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        _, slots = self._slots(session)
        if at is not None:
            pool.k_buffer[0][slots[at]].view(torch.uint8).view(-1)[0] ^= 1
        if swap is not None:
            pair = [slots[swap[0]], slots[swap[1]]]
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[pair] = buffer[pair[::-1]].clone()
        return {}
