"""Flags: what the module cannot serve is refused by name at start, with the way out (SES-7, engines §2)."""

import argparse
import dataclasses
import os
import signal
from types import SimpleNamespace

import pytest
from kvc.errors import ConfigurationError
from kvc.sglang import args


def server_args(**changes):
    plain = dict(
        dp_size=1, tp_size=1, pp_size=1, attn_cp_size=1, enable_dp_attention=False, enable_hierarchical_cache=False,
        enable_lmcache=False, enable_hisparse=False, disable_radix_cache=False, disaggregation_mode="null",
        speculative_algorithm=None, dllm_algorithm=None, enable_memory_saver=False, schedule_policy="fcfs",
        enable_streaming_session=False, kvcache_direct_max_uncached_tokens=None, kvc_config=None, kvc_role=None,
        kvc_listen=None, kvc_peer_listen=None, force_rdma=None, ib_device=None, device="cpu",
    )  # fmt: skip
    return SimpleNamespace(**{**plain, **changes})


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("KVC_LISTEN", "KVC_CONFIG", "KVC_ROLE", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"):
        monkeypatch.delenv(name, raising=False)


def test_rust_needs_no_other_flag():
    a = server_args()
    args.complete(a)
    host, port = a.kvc_listen.split(":")
    assert host == "127.0.0.1" and int(port) > 0
    assert a.enable_streaming_session


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"dp_size": 2}, "--dp-size"),
        ({"tp_size": 2}, "--tp-size"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"schedule_policy": "dfs-weight"}, "dfs-weight"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes, names):
    with pytest.raises(ConfigurationError, match=names):
        args.complete(server_args(**changes))


def test_the_start_stops_with_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        args.check(server_args(dp_size=2))
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvc: --session-aware-cache rust does not work with --dp-size above 1: ")


def test_an_rdma_device_that_is_not_there_is_found_before_the_model_is_loaded(capsys):
    """XFER-9."""
    with pytest.raises(SystemExit) as stopped:
        args.check(server_args(ib_device="nosuch_0"))
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvc: ib_device: ")


def test_what_is_found_wrong_in_the_scheduler_ends_the_engine_with_one_line(capsys, monkeypatch):
    """Known only once the model is loaded; who started the scheduler is told, as of the engine's own errors."""
    pytest.importorskip("sglang")
    from kvc.sglang import hooks

    told = []
    monkeypatch.setattr(hooks.os, "kill", lambda *call: told.append(call))
    scheduler = SimpleNamespace(is_hybrid_swa=False, is_hybrid_ssm=True, is_generation=True, disable_radix_cache=False)
    scheduler.model_config = SimpleNamespace(is_encoder_decoder=False)
    with pytest.raises(SystemExit) as stopped:
        hooks.attach(scheduler)
    assert stopped.value.code == 2 and told == [(os.getppid(), signal.SIGQUIT)]
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvc: --session-aware-cache rust does not work with recurrent state")


def test_a_wrong_setting_is_named_with_its_source(capsys, monkeypatch):
    monkeypatch.setenv("KVC_RHO", "7")
    with pytest.raises(SystemExit):
        args.check(server_args())
    assert "rho" in capsys.readouterr().err


def test_a_listener_beyond_loopback_needs_credentials():
    """XFER-10, F19."""
    with pytest.raises(ConfigurationError, match="listen"):
        args.complete(server_args(kvc_listen="0.0.0.0:7000"))


def test_the_listen_address_of_environment_or_file_reaches_the_http_server(monkeypatch, tmp_path):
    monkeypatch.setenv("KVC_LISTEN", "127.0.0.1:7001")
    a = server_args()
    args.complete(a)
    assert a.kvc_listen == "127.0.0.1:7001"
    monkeypatch.delenv("KVC_LISTEN")
    file = tmp_path / "kvc.toml"
    file.write_text('listen = "127.0.0.1:7002"\n')
    a = server_args(kvc_config=str(file))
    args.complete(a)
    assert a.kvc_listen == "127.0.0.1:7002"


def test_flags_become_settings():
    a = server_args(kvcache_direct_max_uncached_tokens=512, kvc_role="decode")
    assert args.flags_of(a) == {"max_uncached_tokens": "512", "role": "decode"}


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ([], {}),
        (["--force-rdma"], {"force_rdma": "true"}),
        (["--ib-device", "mlx5_0,mlx5_1:2"], {"ib_device": "mlx5_0,mlx5_1:2"}),
    ],
)
def test_the_rdma_flags_reach_the_module(given, settings):
    """XFER-9: by the engine's own parser, as its scheduler process gets them."""
    engine = pytest.importorskip("sglang.srt.server_args").ServerArgs
    parser = argparse.ArgumentParser()
    engine.add_cli_args(parser)  # a flag that the engine had too would be refused here
    parsed = parser.parse_args(["--model-path", "m", *given])
    assert set(args.SETTINGS) <= {field.name for field in dataclasses.fields(engine)}
    assert args.flags_of(parsed) == settings


def test_the_flags_are_unset_by_default():
    parser = argparse.ArgumentParser()
    args.add_cli_args(parser)
    parsed = vars(parser.parse_args([]))
    assert parsed.pop("session_aware_cache") == "python"
    assert set(parsed) == set(args.SETTINGS) and set(parsed.values()) == {None}
