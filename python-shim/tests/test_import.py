"""`import kvc` is cheap and safe in any process: engines and torch stay out of it (issue, deliver 5)."""

import doctest
import json
import subprocess
import sys

from kvc.sglang import identity


def modules_after(*imports: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after these imports."""
    code = f"import sys, json, {', '.join(imports)}; print(json.dumps(list(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return {name.partition(".")[0] for name in json.loads(out.stdout)}


def test_importing_kvc_imports_no_engine_and_no_torch():
    loaded = modules_after(*(f"kvc.{name}" for name in ("errors", "sglang.args", "sglang.http", "sglang.identity")))
    assert not loaded & {"torch", "sglang", "transformers", "zmq", "fastapi", "aiohttp"}


def test_the_patch_command_imports_no_engine_and_no_torch():
    assert not modules_after("kvc.sglang.patch.__main__") & {"torch", "sglang"}


def test_two_pairs_of_salt_and_adapter_are_never_one_identity():
    """SES-5."""
    assert doctest.testmod(identity).failed == 0
    pairs = [(None, None), ("a", None), (None, "a"), ("ab", "c"), ("a", "bc"), ("1:a", None)]
    assert len({identity.identity_of(*pair) for pair in pairs}) == len(pairs)
