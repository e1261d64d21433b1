"""Lets SGLang's paged allocator run on CPU. Loaded at interpreter start by kvc_cpu_engine.pth, also in spawned processes.

`PagedTokenToKVPoolAllocator` launches two Triton kernels, which need a GPU; here torch functions take their place when
`sglang.srt.mem_cache.allocator` is imported. Nothing else of SGLang changes.
"""

import sys
from importlib.machinery import PathFinder

ALLOCATOR = "sglang.srt.mem_cache.allocator"


class Watch:
    """Finds the allocator's module once and patches it after it has run."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != ALLOCATOR:
            return None
        sys.meta_path.remove(Watch)
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.alloc_extend_kernel = OnCpu(extend)
            module.alloc_decode_kernel = OnCpu(decode)

        spec.loader.exec_module = exec_module
        return spec


class OnCpu:
    """`kernel[grid](...)` as a plain call."""

    def __init__(self, call):
        self.call = call

    def __getitem__(self, _grid):
        return self.call


def extend(prefix_lens, seq_lens, last_loc, free_pages, out, _next_power_of_two, page):
    """Slots for tokens [prefix, seq) of each request: first the rest of its last page, then whole free pages."""
    import torch

    offsets, at, used = torch.arange(page), 0, 0
    for prefix, seq, last in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
        in_page = min(seq - prefix, -prefix % page)
        rest = seq - prefix - in_page
        pages = -(-rest // page)
        if used + pages > len(free_pages):
            return  # the caller compares the counts and gives up
        out[at : at + in_page] = last + 1 + torch.arange(in_page)
        fresh = (free_pages[used : used + pages, None] * page + offsets).flatten()
        out[at + in_page : at + in_page + rest] = fresh[:rest]
        at, used = at + in_page + rest, used + pages


def decode(seq_lens, last_loc, free_pages, out, _next_power_of_two, page):
    """One slot for each request: the next in its page, or the first of a free page."""
    used = 0
    for i, (seq, last) in enumerate(zip(seq_lens.tolist(), last_loc.tolist(), strict=True)):
        if (seq - 1) % page:
            out[i] = last + 1
        elif used < len(free_pages):
            out[i] = free_pages[used] * page
            used += 1


sys.meta_path.insert(0, Watch)
