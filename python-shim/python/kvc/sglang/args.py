"""The engine's flags for the module, and what it refuses to run with (SES-7, engines §2)."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import TYPE_CHECKING

from kvc.errors import ConfigurationError

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

VERSION = "0.5.10.post1"

SETTINGS = {
    "kvcache_direct_max_uncached_tokens": "max_uncached_tokens",
    "kvc_config": "config",
    "kvc_role": "role",
    "kvc_listen": "listen",
    "kvc_peer_listen": "peer_listen",
    "force_rdma": "force_rdma",
    "ib_device": "ib_device",
}
"""Server argument → the module's setting. An absent flag leaves the setting to environment, file and default."""


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to the engine's parser."""
    parser.add_argument(
        "--session-aware-cache",
        choices=["python", "rust"],
        default="python",
        help="Who keeps session KV: SessionAwareCache (with --enable-streaming-session) or the kvc module.",
    )
    parser.add_argument(
        "--kvcache-direct-max-uncached-tokens",
        type=int,
        metavar="TOKENS",
        help="rust: the largest append to a resident session that is computed here.",
    )
    parser.add_argument(
        "--kvc-config",
        metavar="FILE",
        help="rust: TOML file with the module's settings; each is also an environment variable, KVC_<NAME>.",
    )
    parser.add_argument("--kvc-role", choices=["prefill", "decode", "both"], help="rust: what this worker is for.")
    parser.add_argument("--kvc-listen", metavar="IP:PORT", help="rust: the module's HTTP listener.")
    parser.add_argument("--kvc-peer-listen", metavar="IP:PORT", help="rust: the module's peer control plane.")
    parser.add_argument(
        "--force-rdma",
        action="store_true",
        default=None,
        help="rust: move KV over RDMA only, and do not start without a device that works.",
    )
    parser.add_argument(
        "--ib-device",
        metavar="DEV[:PORT][,DEV...]",
        help="rust: the RDMA devices to move KV with; the start fails if one does not work. Default: the best ones.",
    )


def flags_of(server_args: ServerArgs) -> dict[str, str]:
    """The module's settings that were given as flags."""
    given = ((setting, getattr(server_args, name)) for name, setting in SETTINGS.items())
    return {setting: _text(value) for setting, value in given if value is not None}


def check(server_args: ServerArgs) -> None:
    """Refuses what the module cannot serve, and completes the arguments. The start stops with one line."""
    try:
        complete(server_args)
    except ConfigurationError as error:
        print(f"kvc: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def complete(server_args: ServerArgs) -> None:
    """As `check`, but raises `ConfigurationError`."""
    for wrong, what, fix in _conflicts(server_args):
        if wrong:
            raise ConfigurationError(f"--session-aware-cache rust does not work with {what}: {fix}")
    from kvc._native import preflight, settings

    flags = flags_of(server_args)
    host, _, port = settings(flags)["listen"].rpartition(":")
    preflight(flags, server_args.device)
    if port == "0":
        # The engine's HTTP server, another process, must know the port.
        server_args.kvc_listen = f"{host}:{_free_port(host.strip('[]'))}"
    else:
        server_args.kvc_listen = f"{host}:{port}"
    server_args.enable_streaming_session = True


def check_scheduler(scheduler: Scheduler) -> None:
    """What is only known once the model is loaded."""
    kinds = (
        (scheduler.is_hybrid_swa, "sliding window attention"),
        (scheduler.is_hybrid_ssm, "recurrent state (Mamba, gated delta net)"),
        (scheduler.model_config.is_encoder_decoder, "encoder-decoder models"),
        (not scheduler.is_generation, "embedding models"),
        (scheduler.disable_radix_cache, "a disabled radix cache"),
    )
    for wrong, what in kinds:
        if wrong:
            raise ConfigurationError(f"--session-aware-cache rust does not work with {what}: use python")


def _conflicts(a: ServerArgs) -> list[tuple[bool, str, str]]:
    return [
        (a.dp_size > 1 or a.enable_dp_attention, "--dp-size above 1", "start one server per rank behind the router"),
        (a.tp_size > 1, "--tp-size above 1", "use --tp-size 1"),
        (a.pp_size > 1, "--pp-size above 1", "use --pp-size 1"),
        (a.attn_cp_size > 1, "--attn-cp-size above 1", "use 1"),
        (a.enable_hierarchical_cache, "--enable-hierarchical-cache", "drop that flag"),
        (a.enable_lmcache, "--enable-lmcache", "drop that flag"),
        (a.enable_hisparse, "--enable-hisparse", "drop that flag"),
        (a.disable_radix_cache, "--disable-radix-cache", "drop that flag"),
        (
            a.disaggregation_mode != "null",
            f"--disaggregation-mode {a.disaggregation_mode}",
            "drop that flag, --kvc-role tells what the worker is for",
        ),
        (a.speculative_algorithm is not None, "--speculative-algorithm", "drop that flag"),
        (a.dllm_algorithm is not None, "--dllm-algorithm", "drop that flag"),
        (a.enable_memory_saver, "--enable-memory-saver", "drop that flag: peers read the KV pool's memory"),
        (a.schedule_policy == "dfs-weight", "--schedule-policy dfs-weight", "use lpm or fcfs"),
        (
            os.environ.get("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "0").lower() in ("1", "true"),
            "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
            "unset that variable",
        ),
    ]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
