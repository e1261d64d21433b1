"""The engine's own pool class, its buffers in memory that other workers of the host can map (XFER-9)."""

import logging
import os
import resource
import sys
from types import SimpleNamespace

import pytest
from kvc.errors import ConfigurationError

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from kvc._native import Layout, SharedMemory  # noqa: E402
from kvc.sglang import args, layout  # noqa: E402
from sglang.srt import server_args as engine_args  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402

SLOTS, PAGE, HEADS, DIM, LAYERS = 1000, 16, 2, 32, 3


@pytest.fixture
def engine(monkeypatch):
    """Sets the arguments of the engine that the pool belongs to."""
    for name in ("KVC_CONFIG", "KVC_MOVERS"):
        monkeypatch.delenv(name, raising=False)

    def of(cache: str) -> None:
        given = SimpleNamespace(session_aware_cache=cache, **dict.fromkeys(args.SETTINGS))
        monkeypatch.setattr(engine_args, "_global_server_args", given)

    of("rust")
    return of


def pool_of(slots=SLOTS, dtype=torch.float32, **more) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        slots, page_size=PAGE, dtype=dtype, head_num=HEADS, head_dim=DIM, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False, **more,
    )  # fmt: skip


def is_shared(pool) -> bool:
    return getattr(pool, "kvc_memory", None) is not None


def memfds() -> dict[int, int]:
    """The process's pool files: descriptor by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:kvc-kv"):
                found[os.fstat(int(name)).st_ino] = int(name)
        except OSError:
            pass  # the listing's own
    return found


@pytest.fixture
def shared(engine):
    """A pool and the descriptor of its file."""
    before = memfds()
    pool = pool_of()
    [file] = [fd for inode, fd in memfds().items() if inode not in before]
    return pool, file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_buffers_are_what_the_engine_would_have_made(engine, dtype):
    shared = pool_of(dtype=dtype, v_head_dim=16)
    engine("python")
    plain = pool_of(dtype=dtype, v_head_dim=16)
    assert is_shared(shared) and not is_shared(plain)
    for ours, theirs in zip(shared.k_buffer + shared.v_buffer, plain.k_buffer + plain.v_buffer, strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert ours.is_contiguous() and ours.data_ptr() % 64 == 0
        assert torch.equal(ours, theirs)
    assert shared.get_contiguous_buf_infos()[1:] == plain.get_contiguous_buf_infos()[1:]
    assert shared.data_ptrs.tolist() == shared.get_contiguous_buf_infos()[0]


def test_the_file_holds_what_the_engine_writes_and_nothing_before(shared):
    pool, file = shared
    assert os.fstat(file).st_blocks == 0, "a page that holds no KV takes no room"
    for number, buffer in enumerate(pool.k_buffer + pool.v_buffer, 1):
        buffer[SLOTS // 2] = number
    row = HEADS * DIM * 4
    room = (SLOTS + PAGE) * row
    room += -room % 4096
    for number in range(1, 2 * LAYERS + 1):
        found = os.pread(file, row, (number - 1) * room + SLOTS // 2 * row)
        assert torch.frombuffer(bytearray(found), dtype=torch.float32).tolist() == [number] * (HEADS * DIM)


def resident(kind: str) -> int:
    """KiB of this process's memory of a kind."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(kind))


def test_a_full_pool_is_in_memory_once(engine):
    before = resident("RssAnon"), resident("RssShmem")
    pool = pool_of(slots=100_000)
    for buffer in pool.k_buffer + pool.v_buffer:
        buffer.fill_(1)
    size = sum(pool.get_kv_size_bytes()) // 1024
    assert resident("RssShmem") - before[1] >= size
    assert resident("RssAnon") - before[0] < size // 4


def test_the_memory_lives_as_long_as_a_tensor_in_it(shared):
    pool, file = shared
    inode = os.fstat(file).st_ino
    last = pool.v_buffer[-1]
    del pool, shared
    last[:] = 7
    assert inode in memfds() and last.sum() == 7 * last.numel()


def test_peers_match_whether_or_not_the_pool_is_shared(engine):
    """XFER-6."""
    shared = pool_of()
    engine("python")
    prints = {layout.of(pool, PAGE).fingerprint for pool in (shared, pool_of())}
    assert len(prints) == 1


def test_a_buffer_that_is_not_in_the_shared_memory_is_refused():
    memory = SharedMemory(8192)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    shape = dict(dtype="float32", device="cpu", layers=1, kv_heads=2, head_dim=8, page_tokens=1)
    Layout(**shape, buffers=[(address, 64, 64), (address + 4096, 64, 64)], shared=memory)
    with pytest.raises(ConfigurationError, match="buffer 1 lies outside the shared memory"):
        Layout(**shape, buffers=[(address, 64, 64), (address + 4160, 64, 64)], shared=memory)


def test_without_the_module_the_pool_is_the_engines_own(engine, monkeypatch):
    engine("python")
    assert not is_shared(pool_of())
    monkeypatch.setattr(engine_args, "_global_server_args", None)
    assert not is_shared(pool_of())


@pytest.mark.parametrize(("movers", "shared"), [("verbs,shm,tcp", True), ("shm", True), ("verbs,tcp", False)])
def test_the_movers_decide(engine, monkeypatch, movers, shared):
    monkeypatch.setenv("KVC_MOVERS", movers)
    assert is_shared(pool_of()) is shared


def test_where_the_system_refuses_the_engine_starts_with_its_own_pool(engine, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with caplog.at_level(logging.WARNING, "kvc"):
            pool = pool_of()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not is_shared(pool) and pool.k_buffer[0].sum() == 0
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("kvc")]
    assert "ftruncate" in line and "File too large" in line and "`ulimit -f`" in line and "KVC_MOVERS" in line


def test_a_child_of_the_engine_inherits_no_pool(shared):
    _, file = shared
    code = f"import os, sys; sys.exit(os.path.exists('/proc/self/fd/{file}'))"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
