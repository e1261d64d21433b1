"""`KvcCache`: what the scheduler holds as its prefix cache in rust mode.

A subclass of `SessionAwareCache`, so that the engine's isinstance checks hold; none of its slots are used. Requests
without a turn go to the engine's radix tree untouched. Session turns are translated: engine rows and nodes become
pointers, lengths and handles, and what the machine gives back is freed. It decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.session_aware_cache import SessionAwareCache
from sglang.srt.utils.common import ceil_align

from kvc._native import Commit, Drop, Engine, Free, Frees, Land, Rows, Turn
from kvc.sglang.identity import extra_key_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.session_controller import Session

ROOT = 0
"""The handle of the tree's root: nothing shared."""


class Run:
    """What one request carries for its turn, from arrival to its end (`Req.kvc`). Retracts start it over."""

    __slots__ = ("adopted", "begun", "found", "matched", "node", "opened", "sid", "turn")

    def __init__(self, turn: Turn, sid: str, opened: Session | None) -> None:
        self.turn = turn
        self.sid = sid
        self.opened = opened
        self.again()

    def again(self) -> None:
        """Before its first run, and after a retract."""
        self.begun = False
        self.adopted = False
        self.node: Node | None = None
        self.matched = 0
        self.found: tuple[tuple[int, int, int, int], MatchResult] | None = None
        """The last match: the engine asks twice per step, and equal answers of the machine name the same slots."""


class Node:
    """In `req.last_node` for a match in a session's own history. `tree` is the engine's node of the shared part, locked
    while `locks` is not 0."""

    __slots__ = ("locks", "tokens", "tree", "turn")

    def __init__(self, turn: Turn, tokens: int, tree: Any) -> None:
        self.turn = turn
        self.tokens = tokens
        self.tree = tree
        self.locks = 0


class Landing:
    """An import between `Land` and `Commit` or `Drop`."""

    __slots__ = ("extra_key", "handle", "have", "head", "held", "node", "slots", "tokens")

    def __init__(
        self,
        tokens: list[int],
        extra_key: str | None,
        held: int,
        match: MatchResult,
        slots: torch.Tensor,
        handle: int,
    ) -> None:
        self.tokens = tokens
        self.extra_key = extra_key
        self.held = held
        self.node = match.last_device_node
        self.head = match.device_indices
        self.have = len(match.device_indices)
        self.slots = slots
        self.handle = handle


class KvcCache(SessionAwareCache):
    """See the module."""

    def __init__(
        self, inner: RadixCache, engine: Engine, lost: Callable[[], torch.Tensor], promised: Callable[[], int]
    ) -> None:
        super().__init__(inner)
        self.engine = engine
        self._lost = lost
        self._promised = promised
        self.prefixes: dict[int, Any] = {}
        self.landings: dict[int, Landing] = {}
        self.waiting_lands: list[tuple[Land, Any]] = []
        self.pending: dict[Req, None] = {}
        """Requests with a turn that has not begun."""
        self.running: dict[Req, None] = {}
        """Requests with a begun turn."""
        self.starting: list[Req] = []
        """Requests of the batch that allocates now: their rows do not name their slots yet."""
        self._handles = itertools.count(1)
        table = self.req_to_token_pool.req_to_token
        self._host_rows = Rows(table) if table.device.type == "cpu" else None
        self.observer: Any = None
        """Told of every committed row in tests (`kvc.sglang.testing`)."""

    # Sizes: read by the scheduler's budget and its memory checks.

    def evictable_size(self) -> int:
        own: int = self.inner.evictable_size()
        # After a fault what sessions held is found by looking: it stays room that requests were admitted on.
        sessions = len(self._lost()) * self.page_size if self.engine.faulted else self.engine.evictable()
        return own + sessions

    def session_held_tokens(self) -> int:
        return self.engine.held()

    def session_held_full_tokens(self) -> int:
        return self.session_held_tokens()

    def session_held_swa_tokens(self) -> int:
        return 0

    def session_held_req_count(self) -> int:
        return 0  # OWN-3: idle sessions keep no row

    # A request's way.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        req = params.req
        run: Run | None = None if req is None else req.kvc
        if run is None:
            return self.inner.match_prefix(params)
        if req.to_finish is not None or self.engine.faulted:
            # Aborted before it ran; its tokens may have been replaced by one. It ends without the session (F4).
            self.leave(req)
            return self.inner.match_prefix(params)
        matched = run.turn.match(len(params.key.token_ids))
        if matched is None:
            return self.inner.match_prefix(params)
        if run.found is not None and run.found[0] == matched:
            return run.found[1]
        tokens, shared, prefix, _ = matched
        slots = torch.empty(tokens, dtype=torch.int64)
        run.turn.slots_into(slots.data_ptr(), tokens)
        node = Node(run.turn, tokens, self._tree_node(prefix))
        result = MatchResult(
            device_indices=slots if self._host_rows else slots.to(self.inner.device, non_blocking=True),
            last_device_node=node,
            last_host_node=node,
            cache_protected_len=shared,
        )
        run.found = (matched, result)
        return result

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        if not isinstance(node, Node):
            return self.inner.inc_lock_ref(node)
        node.locks += 1
        if node.locks > 1:
            return IncLockRefResult()
        node.turn.claim(node.tokens)
        return self.inner.inc_lock_ref(node.tree)

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> DecLockRefResult:
        if not isinstance(node, Node):
            return self.inner.dec_lock_ref(node, params)
        node.locks -= 1
        if node.locks > 0:
            return DecLockRefResult()
        node.turn.unclaim()
        return self.inner.dec_lock_ref(node.tree)

    def kvc_begin(self, reqs: list[Req]) -> None:
        """From the allocator's caller: these requests run now; a rewound tail is freed before they allocate (OWN-7)."""
        self.starting = reqs
        for req in reqs:
            run: Run | None = req.kvc
            if run is None or run.begun:
                continue
            run.begun = True
            run.matched = len(req.prefix_indices)
            run.node = req.last_node if isinstance(req.last_node, Node) else None
            run.found = None
            self.pending.pop(req, None)
            self.running[req] = None
            self.free(run.turn.begin())

    def cache_unfinished_req(self, req: Req, **kwargs: Any) -> None:
        run = self._run(req)
        if run is None:
            self.inner.cache_unfinished_req(req, **kwargs)
            return
        end = len(req.fill_ids)
        run.turn.progress(end, *self._rows(req, end))
        if kwargs.get("chunked", False):
            req.prefix_indices = self._row(req, end).to(dtype=torch.int64, copy=True)
        elif run.node is None:
            self._adopt(req, run, req.fill_ids)

    def cache_finished_req(self, req: Req, is_insert: bool = True, **kwargs: Any) -> None:
        run = self._run(req)
        if run is None:
            self.inner.cache_finished_req(req, is_insert=is_insert, **kwargs)
            return
        aborted = isinstance(req.finished_reason, FINISH_ABORT) or isinstance(req.to_finish, FINISH_ABORT)
        end = req.pop_committed_kv_cache()
        if is_insert and not aborted:
            self._commit(req, run, end)
        else:
            self._roll_back(req, run, end, retract=not aborted)
        self.running.pop(req, None)
        if is_insert or aborted:
            req.kvc = None
        else:
            run.again()
            self.pending[req] = None
        # req_pool_idx stays set: the engine frees over-allocated tokens and the row as for any request (OWN-3).

    def leave(self, req: Req) -> None:
        """The request goes on, or is gone, without its turn."""
        run: Run | None = req.kvc
        if run is not None:
            run.turn.cancel()
            req.kvc = None
        self.pending.pop(req, None)

    # Room.

    def evict(self, params: EvictParams) -> EvictResult:
        allocator = self.token_to_kv_pool_allocator
        before = allocator.available_size()
        if self.engine.faulted:
            self.reclaim()
        # Idle sessions lock nothing; their shared prefixes are guarded only while others' are looked for (SES-6).
        guarded = {handle: self.prefixes[handle] for handle in self.engine.idle_prefixes()}
        for node in guarded.values():
            self.inner.inc_lock_ref(node)
        try:
            while (short := params.num_tokens - allocator.available_size()) > 0:
                self.inner.evict(EvictParams(num_tokens=short))
                if allocator.available_size() >= params.num_tokens:
                    break
                frees = self.engine.victim()
                if frees is None:
                    break
                for handle in frees.prefixes:
                    node = guarded.pop(handle, None)
                    if node is not None:
                        self.inner.dec_lock_ref(node)
                self.free(frees)
        finally:
            for node in guarded.values():
                self.inner.dec_lock_ref(node)
        return EvictResult(num_tokens_evicted=allocator.available_size() - before)

    def reclaim(self) -> None:
        """After a fault: pages that nobody names any more are the engine's again."""
        lost = self._lost()
        if len(lost):
            self.token_to_kv_pool_allocator.free(lost * self.page_size)

    def free(self, frees: Frees | None) -> None:
        """Gives back what the machine gave up: one slot of each page, and handles nobody needs any more."""
        if frees is None:
            return
        if frees.slots:
            slots = torch.frombuffer(frees.slots, dtype=torch.int64)
            self.token_to_kv_pool_allocator.free(slots.to(self.inner.device))
        for handle in frees.prefixes:
            self.prefixes.pop(handle, None)

    def reset(self) -> None:
        """Flush: the engine clears its pool next. Imports and leases are fenced before this returns."""
        self.engine.flush()
        self.prefixes.clear()
        self.landings.clear()
        self.waiting_lands.clear()
        self.inner.reset()

    def release_session(self, session_id: str) -> None:
        """Close of a streaming session: at once if idle, at the end of its turn otherwise (SES-2)."""
        self.engine.close(session_id)

    # Commands of the loop call.

    def carry_out(self, command: Free | Land | Commit | Drop) -> None:
        """One command of `Engine.poll`."""
        if isinstance(command, Free):
            self.free(command.frees)
        elif isinstance(command, Land):
            self._land(command)
        elif isinstance(command, Commit):
            self._commit_import(command)
        else:
            self._give_up(command.locked)
            self.free(command.frees)

    def land_waiting(self) -> None:
        """Once per loop iteration: imports that found no room look again; those that died in between are forgotten."""
        waiting, self.waiting_lands = self.waiting_lands, []
        for command, node in waiting:
            self.inner.dec_lock_ref(node)
            if self.engine.session_of(command.import_id) is not None:
                self._land(command)

    def _land(self, command: Land) -> None:
        tokens = command.tokens
        extra_key = extra_key_of(command.identity)
        match = self.inner.match_prefix(MatchPrefixParams(key=RadixKey(tokens, extra_key)))
        need = ceil_align(len(tokens), self.page_size) - max(len(match.device_indices), command.held)
        self.inner.inc_lock_ref(match.last_device_node)
        room = self.token_to_kv_pool_allocator.available_size() + self.evictable_size()
        promised = self._promised()
        if need + promised > room and (promised or self.landings):
            if room < promised:  # the lock alone takes what the next chunk of a prefill was promised
                self.inner.dec_lock_ref(match.last_device_node)
                self.engine.land_failed(command.import_id)
                return
            # It waits locked: the machine pins an older copy meanwhile and `evict` guards that copy's prefix, so the
            # tree must not count it as room.
            self.waiting_lands.append((command, match.last_device_node))
            return
        evict_from_tree_cache(self, need)
        slots = self.token_to_kv_pool_allocator.alloc(need)
        if slots is None:
            self.inner.dec_lock_ref(match.last_device_node)
            self.engine.land_failed(command.import_id)
            return
        # A handle of its own even for the root: `Drop` names an import by nothing else.
        handle = self._handle(match.last_device_node)
        landing = Landing(tokens, extra_key, command.held, match, slots, handle)
        self.landings[command.import_id] = landing
        head, own = landing.head.cpu(), slots.cpu()
        frees = self.engine.landed(
            command.import_id, landing.have, landing.handle, (head.data_ptr(), len(head)), (own.data_ptr(), len(own))
        )
        if frees is not None and landing.handle in frees.prefixes:  # it died meanwhile
            self._give_up(landing.handle)
        self.free(frees)

    def _commit_import(self, command: Commit) -> None:
        landing = self.landings.pop(command.import_id)
        head, wanted = landing.head, command.share // self.page_size * self.page_size
        if wanted > landing.have:
            key = RadixKey(landing.tokens[:wanted], landing.extra_key)
            value = torch.cat([landing.head, landing.slots[: wanted - landing.have]])
            self.inner.insert(InsertParams(key=key, value=value))
            match = self.inner.match_prefix(MatchPrefixParams(key=key))
            head = match.device_indices
            host = head.cpu()
            handle = self._handle(match.last_device_node)
            frees = self.engine.import_shared(command.import_id, wanted, handle, (host.data_ptr(), len(host)))
            self.free(frees)
        self.inner.dec_lock_ref(landing.node)
        if self.observer is not None:
            self.observer.imported(command.import_id, landing, head)
        self.engine.import_committed(command.import_id)

    def _give_up(self, handle: int) -> None:
        """An import is dead: its node is unlocked."""
        for import_id, landing in self.landings.items():
            if landing.handle == handle:
                del self.landings[import_id]
                self.inner.dec_lock_ref(landing.node)
                break
        self.prefixes.pop(handle, None)

    # Translation.

    def _run(self, req: Req) -> Run | None:
        run: Run | None = req.kvc
        if run is not None and run.node is None and not run.adopted and self.engine.faulted:
            # The module ended while this request ran on nothing of a session: it goes on as a plain one.
            self.running.pop(req, None)
            run = req.kvc = None
        return run

    def _row(self, req: Req, end: int) -> torch.Tensor:
        return self.req_to_token_pool.req_to_token[req.req_pool_idx, :end]

    def _rows(self, req: Req, end: int) -> tuple[Rows, int]:
        """The first `end` slots of the request's row for the machine: where they lie, or a copy from the device."""
        if self._host_rows is not None:
            return self._host_rows, req.req_pool_idx
        return Rows(self._row(req, end).cpu().view(1, -1)), 0

    def _handle(self, node: Any) -> int:
        """A handle of its own for every adoption and import: forgetting one never touches another's."""
        handle = next(self._handles)
        self.prefixes[handle] = node
        return handle

    def _tree_node(self, handle: int) -> Any:
        return self.inner.root_node if handle == ROOT else self.prefixes[handle]

    def _adopt(self, req: Req, run: Run, tokens: list[int]) -> None:
        """The first prompt goes into the engine's tree, once, at the end of its prefill (SES-6)."""
        below = req.cache_protected_len
        shared = max(run.turn.share_len() // self.page_size * self.page_size, below)
        if shared > below:
            key = RadixKey(tokens[:shared], req.extra_key)
            value = self._row(req, shared).to(dtype=torch.int64, copy=True)
            self.inner.insert(InsertParams(key=key, value=value, priority=getattr(req, "priority", 0) or 0))
            match = self.inner.match_prefix(MatchPrefixParams(key=key))
            self.req_to_token_pool.write((req.req_pool_idx, slice(below, shared)), match.device_indices[below:])
            self.inner.inc_lock_ref(match.last_device_node)
            self.inner.dec_lock_ref(req.last_node)
            req.last_node = match.last_device_node
            req.cache_protected_len = shared
        run.adopted = True
        handle = self._handle(req.last_node)
        self.free(run.turn.adopt(shared, handle, *self._rows(req, len(tokens)), len(tokens)))

    def _commit(self, req: Req, run: Run, end: int) -> None:
        if run.node is None and not run.adopted:
            # It ended in its prefill: `cache_unfinished_req` was never called.
            run.turn.progress(len(req.fill_ids), *self._rows(req, len(req.fill_ids)))
            self._adopt(req, run, req.fill_ids)
        committed = min(end, len(req.origin_input_ids) + len(req.output_ids))
        frees = run.turn.commit(committed, req.output_ids, *self._rows(req, committed))
        beyond = self._row(req, end)[ceil_align(committed, self.page_size) :] if committed < end else None
        self._let_go(req, frees, beyond)
        if run.opened is not None:
            run.opened.kvc_len = committed  # should the machine have kept less, the next turn is compared again
        if self.observer is not None:
            row = self._row(req, committed).cpu()
            self.observer.committed(run.sid, (req.origin_input_ids + req.output_ids)[:committed], row)

    def _roll_back(self, req: Req, run: Run, end: int, retract: bool) -> None:
        frees = run.turn.rollback(end, *self._rows(req, end), retract)
        # Before the adoption the machine owns none of the row: what the tree does not hold goes back here.
        unowned = self._row(req, end)[req.cache_protected_len :] if run.node is None and not run.adopted else None
        self._let_go(req, frees, unowned)
        if run.opened is not None:
            run.opened.kvc_len = self.engine.history_len(run.sid)

    def _let_go(self, req: Req, frees: Frees | None, unowned: torch.Tensor | None) -> None:
        self.dec_lock_ref(req.last_node)
        self.free(frees)
        if unowned is not None and len(unowned):
            self.token_to_kv_pool_allocator.free(unowned.to(dtype=torch.int64))
