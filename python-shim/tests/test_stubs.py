"""The stubs say what the native module has, and the package is typed against them."""

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]

pytest.importorskip("mypy")


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=PACKAGE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stubs_match_the_native_module():
    run("mypy.stubtest", "kvc._native", "kvc.errors", "kvc.sglang.identity")


def test_the_package_is_typed():
    run("mypy", "python/kvc")
