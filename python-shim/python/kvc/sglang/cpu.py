"""The paged allocator's two kernels for CPU, where Triton has no driver. Called by the allocator on that device.

Same arguments and results as the Triton kernels; plain loops, because a CPU server is for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    """Puts the functions in the kernels' place, in rust mode and in tests of the plain engine (KVC_TEST=1)."""
    from sglang.srt.mem_cache import allocator
    from sglang.srt.server_args import get_global_server_args

    if get_global_server_args().session_aware_cache == "rust" or os.environ.get("KVC_TEST") == "1":
        allocator.alloc_extend_kernel = _Launcher(extend)
        allocator.alloc_decode_kernel = _Launcher(decode)


def extend(
    before: torch.Tensor,
    after: torch.Tensor,
    last: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _batch: int,
    page: int,
) -> None:
    """Slots for the tokens `[before, after)` of each request: first the rest of its last page, then fresh pages.

    With too few free pages it stops; the allocator counts them afterwards and reports the shortage.
    """
    fresh = iter(free_pages.tolist())
    slots: list[int] = []
    for start, end, slot in zip(before.tolist(), after.tolist(), last.tolist(), strict=True):
        for position in range(start, end):
            if position % page == 0:
                free = next(fresh, None)
                if free is None:
                    return
                slot = free * page
            else:
                slot += 1
            slots.append(slot)
    out.copy_(torch.tensor(slots, dtype=out.dtype))


def decode(
    after: torch.Tensor, last: torch.Tensor, free_pages: torch.Tensor, out: torch.Tensor, _batch: int, page: int
) -> None:
    """One more slot for each request."""
    extend(after - 1, after, last, free_pages, out, _batch, page)


class _Launcher:
    """`kernel[grid](...)` calls the function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return self._function
