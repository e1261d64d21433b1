"""What the patched scheduler calls: `attach` once at start, then `route`, `arrive`, `poll` and `sweep` of its result.

Requests with a session get a turn here, and the machine's commands are carried out once per loop iteration (OWN-2).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from zmq import POLLIN

from kvc._native import Abort, Engine, Turn, TurnTag
from kvc.errors import ConfigurationError, Refused
from kvc.sglang import args, layout
from kvc.sglang.cache import KvcCache, Run
from kvc.sglang.http import ROUTING_KEY
from kvc.sglang.identity import identity_of

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.session_controller import Session

log = logging.getLogger(__name__)

STUCK_ITERATIONS = 3
"""Loop iterations in which nothing runs and nothing fits before a waiting turn loses its own session (SES-3)."""


def attach(scheduler: Scheduler) -> Hooks:
    """Starts the module in this scheduler process and puts the cache in its place. What is wrong with the configuration
    ends the engine with one line."""
    try:
        return _attached(scheduler)
    except ConfigurationError as error:
        print(f"kvc: {error}", file=sys.stderr, flush=True)
        # The engine's own way to end after an error here, less the traceback.
        os.kill(os.getppid(), signal.SIGQUIT)
        raise SystemExit(2) from None


def _attached(scheduler: Scheduler) -> Hooks:
    args.check_scheduler(scheduler)
    engine = Engine(
        flags=args.flags_of(scheduler.server_args),
        layout=layout.of(scheduler.token_to_kv_pool_allocator.get_kvcache(), scheduler.page_size),
        capacity=scheduler.max_total_num_tokens,
        engine=f"sglang {args.VERSION}",
        model=scheduler.server_args.served_model_name or scheduler.server_args.model_path,
    )
    hooks = Hooks(scheduler, engine)
    scheduler.tree_cache = hooks.cache
    if os.environ.get("KVC_TEST") == "1":
        from kvc.sglang import testing

        testing.observe(scheduler, hooks)
    log.info("kvc: listening on %s, peers on %s", engine.listen, engine.peer)
    return hooks


class Hooks:
    """One per scheduler process."""

    def __init__(self, scheduler: Scheduler, engine: Engine) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.cache = KvcCache(scheduler.tree_cache, engine, self._lost, self._promised)
        self._stuck = 0
        self._nudge: int | None = None
        if scheduler.idle_sleeper is not None:
            # A sleeping loop wakes for the module's commands, and does not sleep while a turn is stuck.
            self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            for descriptor in (engine.wake_fd(), self._nudge):
                scheduler.idle_sleeper.poller.register(descriptor, POLLIN)

    def route(self, recv_req: TokenizedGenerateReqInput) -> bool:
        """Before the request object exists: whose turn is it? True: the request has been refused."""
        recv_req.kvc = None
        try:
            recv_req.kvc = self._routed(recv_req)
        except Refused as refused:
            self._refuse(recv_req, refused)
            return True
        if recv_req.kvc is not None and recv_req.kvc.tag.prefill:
            recv_req.sampling_params.max_new_tokens = 0
            recv_req.sampling_params.min_new_tokens = 0
        return False

    def arrive(self, recv_req: TokenizedGenerateReqInput, req: Req) -> bool:
        """The request is about to be queued. True: it has been refused instead, before any work (ADM-14)."""
        if recv_req.extra_key:
            # This release accepts the key and ignores it.
            req.extra_key = recv_req.extra_key + (req.lora_id or "")
        routed: Routed | None = recv_req.kvc
        if routed is None or req.to_finish is not None:
            return False
        identity = identity_of(recv_req.extra_key, req.lora_id)
        try:
            try:
                turn = self._arrive(routed, req, identity)
            except Refused as refused:
                # Who holds the session may have left the queue unseen, by a limit or a timeout.
                if refused.code != "session-busy" or not self.sweep():
                    raise
                turn = self._arrive(routed, req, identity)
        except Refused as refused:
            routed.restore()
            self._refuse(recv_req, refused)
            return True
        if turn is None:  # sessions are off: it runs plain
            return False
        req.kvc = Run(turn, routed.tag.session, routed.opened)
        self.cache.pending[req] = None
        return False

    def sweep(self) -> bool:
        """Turns whose requests have left the queue without running are over; true if there were any."""
        if not self.cache.pending:
            return False
        scheduler = self.scheduler
        queued = {id(req) for req in scheduler.waiting_queue}
        queued.update(id(req) for req in scheduler.grammar_manager.grammar_queue)
        gone = [req for req in self.cache.pending if id(req) not in queued]
        for req in gone:
            self.cache.leave(req)
        return bool(gone)

    def poll(self) -> None:
        """Once per loop iteration."""
        scheduler, cache = self.scheduler, self.cache
        if self._nudge is not None:
            self.engine.clear_wake()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._nudge)
        self.sweep()
        if scheduler.running_batch.is_empty():
            # "No token" while nothing runs marks the empty batch as full, and nothing upstream ever resets it.
            scheduler.running_batch.batch_is_full = False
        self._unwedge()
        cache.starting = []
        if self.engine.faulted:
            cache.reclaim()
            return
        commands = self.engine.poll(
            free=scheduler.token_to_kv_pool_allocator.available_size(),
            tree_evictable=cache.inner.evictable_size(),
            running=len(scheduler.running_batch.reqs),
            waiting=len(scheduler.waiting_queue),
            pending_prefill_tokens=sum(len(req.origin_input_ids) for req in scheduler.waiting_queue),
            reserved=self._promised(),
            allocated=[(req.kvc.turn.id, max(0, req.kv_allocated_len - req.kvc.matched)) for req in cache.running],
        )
        cache.land_waiting()
        for command in commands:
            if isinstance(command, Abort):
                self._abort(command.turn_id)
            else:
                cache.carry_out(command)

    def _abort(self, turn_id: int) -> None:
        """SES-4: the session lives elsewhere now. The turn ends as if its client had gone; that is told why."""
        cache, scheduler = self.cache, self.scheduler
        turns = (*cache.pending, *cache.running)
        req = next((req for req in turns if req.kvc is not None and req.kvc.turn.id == turn_id), None)
        if req is None or req.finished():
            return
        reason = _finish(Refused("stale-epoch", f"session {req.kvc.sid!r} was granted elsewhere during this turn"))
        if req in cache.pending and req in scheduler.waiting_queue:
            scheduler.waiting_queue.remove(req)
            cache.leave(req)
            scheduler.send_to_tokenizer.send_output(AbortReq(finished_reason=reason.to_json(), rid=req.rid), req)
            return
        if req in cache.pending:
            # Its grammar is being compiled: it still passes through one short prefill.
            scheduler.grammar_manager.abort_requests(AbortReq(rid=req.rid))
        elif req is scheduler.chunked_req and not (req.return_logprob or req.multimodal_inputs or req.kvc.opened):
            # The engine computes an aborted prefill to its end, and the reseed elsewhere waits for this turn: the next
            # chunk, of one token, is the last.
            req.origin_input_ids = req.origin_input_ids[: len(req.fill_ids) + 1]
        req.to_finish = reason

    def _promised(self) -> int:
        """Tokens that a landing must leave: what the engine expects the running requests to take, by its own rule, and
        the rest of the prefill under way: later chunks are not checked, and a shortage there ends the scheduler."""
        scheduler, page = self.scheduler, int(self.scheduler.page_size)
        batches = (scheduler.last_batch, scheduler.running_batch)
        reqs = {id(req): req for batch in batches if batch is not None for req in batch.reqs if not req.finished()}
        chunked = scheduler.chunked_req
        if chunked is not None:
            reqs[id(chunked)] = chunked
        promised = 0
        for req in reqs.values():
            output = min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
            promised += int(output * scheduler.new_token_ratio) + page
        if chunked is not None:
            promised += len(chunked.origin_input_ids) + len(chunked.output_ids) - chunked.kv_allocated_len + page
        return promised

    def _owners(self) -> list[Req]:
        scheduler = self.scheduler
        batches = [batch for batch in (scheduler.last_batch, scheduler.cur_batch, scheduler.running_batch) if batch]
        reqs = {id(req): req for batch in batches for req in batch.reqs}
        reqs.update((id(req), req) for req in (*self.cache.running, *self.cache.starting))
        if scheduler.chunked_req is not None:
            reqs[id(scheduler.chunked_req)] = scheduler.chunked_req
        return [req for req in reqs.values() if not req.kv_committed_freed]

    def _lost(self) -> torch.Tensor:
        """After a fault of the module: the pages that neither the allocator, the tree nor a request's row names."""
        allocator, inner, page = self.scheduler.token_to_kv_pool_allocator, self.cache.inner, self.scheduler.page_size
        lost = torch.ones(allocator.size // page + 1, dtype=torch.bool, device=inner.device)
        lost[0] = False  # takes the writes of padding
        lost[allocator.free_pages] = False
        lost[allocator.release_pages] = False
        if inner.total_size():
            lost[inner.all_values_flatten() // page] = False
        rows = self.scheduler.req_to_token_pool.req_to_token
        for req in self._owners():
            lost[req.prefix_indices.long() // page] = False
            if req.req_pool_idx is not None:
                lost[rows[req.req_pool_idx, : req.kv_allocated_len].long() // page] = False
        return lost.nonzero().view(-1)

    def _unwedge(self) -> None:
        """SES-3, last resort: an unaligned restore can cost the page that is missing."""
        scheduler = self.scheduler
        idle = (
            scheduler.waiting_queue
            and scheduler.running_batch.is_empty()
            and scheduler.chunked_req is None
            and not scheduler.last_batch
            and not scheduler._engine_paused
            and not self.cache.landings
        )
        self._stuck = self._stuck + 1 if idle else 0
        if self._stuck and self._nudge is not None:
            os.eventfd_write(self._nudge, 1)
        if self._stuck > STUCK_ITERATIONS:
            run: Run | None = scheduler.waiting_queue[0].kvc
            if run is not None:
                self.cache.free(run.turn.unwedge())

    def _routed(self, recv_req: TokenizedGenerateReqInput) -> Routed | None:
        tag = None
        key = recv_req.routing_key
        if key is not None and key.startswith(ROUTING_KEY):
            recv_req.routing_key = None
            tag = TurnTag.parse(key[len(ROUTING_KEY) :])
        sessions = self.scheduler.session_controller
        params = recv_req.session_params
        if params is None or params.id is None:
            if tag is not None and tag.session in sessions:
                raise Refused("bad-request", f"session {tag.session!r} was opened: name it in session_params")
            return None if tag is None else Routed(tag, None)
        if not isinstance(params.id, str):
            raise Refused("bad-request", f"session_params.id must be a string, got {type(params.id).__name__}")
        if params.id not in sessions:
            for name in ("rid", "offset", "replace", "drop_previous_output"):
                if getattr(params, name):
                    raise Refused("bad-request", f"session_params.{name} needs a session that was opened")
            recv_req.session_params = None
            return Routed(tag or TurnTag.of(params.id), None)
        session = sessions.get(params.id)
        if not session.streaming:
            return None
        self.sweep()
        last = next(iter(session.req_nodes.values())).req if session.req_nodes else None
        if last is not None and last.kvc is not None:
            raise Refused("session-busy", f"a turn of session {params.id!r} has not finished")
        return Routed(tag if tag is not None and tag.session == params.id else TurnTag.of(params.id), session)

    def _arrive(self, routed: Routed, req: Req, identity: str) -> Turn | None:
        # The streaming API appends to what this session's last turn left: no need to compare it again.
        known = 0 if routed.opened is None else getattr(routed.opened, "kvc_len", 0)
        most = max(0, req.sampling_params.max_new_tokens)
        return self.engine.arrive(routed.tag, identity, req.origin_input_ids, known, most)

    def _refuse(self, recv_req: TokenizedGenerateReqInput, refused: Refused) -> None:
        reason = _finish(refused).to_json()
        self.scheduler.send_to_tokenizer.send_output(AbortReq(finished_reason=reason, rid=recv_req.rid), recv_req)


def _finish(refused: Refused) -> FINISH_ABORT:
    """How the client learns of it: status, message, and the code as the error's type."""
    return FINISH_ABORT(str(refused), HTTPStatus(refused.status), refused.code)


class Routed:
    """A request's session, between `route` and `arrive`."""

    __slots__ = ("_last", "_nodes", "opened", "tag")

    def __init__(self, tag: TurnTag, opened: Session | None) -> None:
        self.tag = tag
        self.opened = opened
        self._nodes = None if opened is None else dict(opened.req_nodes)
        self._last = next(iter(self._nodes.values())).req if self._nodes else None

    def restore(self) -> None:
        """The opened session appends to its last turn again, as if the refused one had never come."""
        if self.opened is not None:
            self.opened.req_nodes = self._nodes
            if self._last is not None:
                self._last.session = self.opened
