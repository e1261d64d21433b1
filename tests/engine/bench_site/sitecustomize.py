"""On PYTHONPATH of a benched engine: times what the scheduler thread spends in its prefix cache.

Wraps the cache's methods after the scheduler has built it, whichever cache it is, and appends one JSON line per finished
request to KVC_BENCH_OUT: microseconds per method since the request before. Attention is switched off: on CPU it takes
seconds for such a context, and its result does not matter here.
"""

import json
import os
import sys
import time
from collections import defaultdict
from importlib.machinery import PathFinder

ATTENTION = "sglang.srt.layers.attention.torch_native_backend"
SCHEDULER = "sglang.srt.managers.scheduler"
METHODS = ("match_prefix", "inc_lock_ref", "dec_lock_ref", "kvc_begin", "cache_unfinished_req", "cache_finished_req")


class AfterImport:
    """Runs `then` on a module once it is loaded."""

    def __init__(self, name, then):
        self.name, self.then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def in_scheduler(module):
    build = module.Scheduler.init_cache_with_memory_pool

    def build_and_watch(self, *args, **kw):
        out = build(self, *args, **kw)
        watch(self.tree_cache)
        return out

    module.Scheduler.init_cache_with_memory_pool = build_and_watch


def without_attention(module):
    def nothing(self, query, output, *_, **__):
        return output.zero_()

    module.TorchNativeAttnBackend._run_sdpa_forward_extend = nothing
    module.TorchNativeAttnBackend._run_sdpa_forward_decode = nothing


def in_hooks(module):
    """Ours takes a request's tokens over when it arrives, outside the cache object."""
    module.Hooks.arrive = timed("arrive", module.Hooks.arrive)


def watch(cache):
    for name in METHODS:
        if hasattr(cache, name):
            setattr(cache, name, timed(name, getattr(cache, name)))


def timed(name, method):
    def call(*args, **kw):
        depth[0] += 1
        begin = time.perf_counter()
        try:
            return method(*args, **kw)
        finally:
            depth[0] -= 1
            if depth[0] == 0:  # a method that calls another is counted once
                spent[name] += (time.perf_counter() - begin) * 1e6
            if name == "cache_finished_req":
                with open(os.environ["KVC_BENCH_OUT"], "a") as out:
                    out.write(json.dumps(spent) + "\n")
                spent.clear()

    return call


spent: dict[str, float] = defaultdict(float)
depth = [0]
if "KVC_BENCH_OUT" in os.environ:
    watched = {SCHEDULER: in_scheduler, ATTENTION: without_attention, "kvc.sglang.hooks": in_hooks}
    sys.meta_path[:0] = [AfterImport(name, then) for name, then in watched.items()]
