"""The engine's KV pool as addresses and sizes. Pools that the module does not understand are refused (SES-7)."""

from __future__ import annotations

from typing import Any

from kvc._native import Layout
from kvc.errors import ConfigurationError

SUPPORTED = "MHATokenToKVPool"


def of(pool: Any, page_tokens: int) -> Layout:
    """The layout of a pool: K of all layers, then V of all layers, one row per token slot."""
    if type(pool).__name__ != SUPPORTED:
        raise ConfigurationError(
            f"--session-aware-cache rust: KV pool {type(pool).__name__} is not supported, only {SUPPORTED}; "
            "serve this model with --session-aware-cache python"
        )
    bases, sizes, pages = pool.get_contiguous_buf_infos()
    rows = [page // page_tokens for page in pages]
    return Layout(
        dtype=str(pool.dtype).removeprefix("torch."),
        device=str(pool.device),
        layers=pool.layer_num,
        kv_heads=pool.head_num,
        head_dim=pool.head_dim,
        page_tokens=page_tokens,
        buffers=[(base, row, size // row) for base, row, size in zip(bases, rows, sizes, strict=True)],
        shared=getattr(pool, "kvc_memory", None),
    )
