"""The engine's KV pool on CPU lies in memory that other workers of the host can map (XFER-9). Called by the pool as it
makes its buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from kvc._native import SharedMemory, settings
from kvc.sglang import args

log = logging.getLogger(__name__)

PAGE = 4096
"""Each buffer begins on a page of its own."""


def zeros_for(pool: Any) -> Callable[..., torch.Tensor]:
    """`torch.zeros` for the buffers of a pool. Where workers of this host may map each other's pools it gives out one
    shared memory, which `pool.kvc_memory` names; nothing is written, so a page takes room only once it holds KV."""
    own: Callable[..., torch.Tensor] = torch.zeros
    if not _wanted():
        return own
    rows = pool.size + pool.page_size
    buffers = [(rows, pool.head_num, dim) for dim in (pool.head_dim, pool.v_head_dim)] * pool.layer_num
    try:
        memory = SharedMemory(sum(_room(shape, pool.store_dtype) for shape in buffers))
    except OSError as error:
        log.warning(
            "kvc: workers of this host cannot map the KV pool and pull it over tcp: %s. Allow memfd_create (seccomp), "
            "raise `ulimit -f` and `ulimit -n`, or leave shm out of KVC_MOVERS",
            error.strerror,
        )
        return own
    pool.kvc_memory = memory
    taken = 0

    def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: str) -> torch.Tensor:
        nonlocal taken
        offset, taken = taken, taken + _room(shape, dtype)
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)

    return zeros


def _wanted() -> bool:
    from sglang.srt.server_args import get_global_server_args

    try:
        server_args = get_global_server_args()
    except ValueError:  # a pool without an engine
        return False
    if server_args.session_aware_cache != "rust":
        return False
    return "shm" in settings(args.flags_of(server_args))["movers"].split(",")


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = prod(shape) * int(dtype.itemsize)
    return size + -size % PAGE
