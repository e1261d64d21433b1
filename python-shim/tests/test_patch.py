"""The patch command on a copy of the files as the wheel installs them: all or nothing, and back byte for byte."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvc.sglang import patch
from kvc.sglang.patch import Installed, PatchError, Series
from kvc.sglang.patch.__main__ import main
from kvc.sglang.patch.diff import parse

VERSION = "0.5.10.post1"


@pytest.fixture(scope="module")
def pristine() -> dict[str, bytes]:
    """The touched files of the installed engine, patched or not, as the wheel has them."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        pytest.skip("no engine in this environment")
    installed = Installed(Path(next(iter(spec.submodule_search_locations))).parent, Series.load(VERSION))
    out = {}
    for path, state in installed.states().items():
        assert state in ("original", "patched"), path
        text = (installed.site / path).read_bytes().decode()
        out[path] = (text if state == "original" else installed.series.backward(path, text)).encode()
    return out


@pytest.fixture
def installed(tmp_path: Path, pristine: dict[str, bytes]) -> Installed:
    """A site folder with the touched files, unpatched."""
    for path, content in pristine.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
        (tmp_path / path).chmod(0o640)
    return Installed(tmp_path, Series.load(VERSION))


def contents(installed: Installed) -> dict[str, bytes]:
    files = (p for p in installed.site.rglob("*") if p.is_file())
    return {str(p.relative_to(installed.site)): p.read_bytes() for p in files}


def test_apply_patches_once_and_revert_restores_every_byte(installed, pristine):
    assert installed.apply() == sorted(pristine)
    patched = contents(installed)
    assert set(installed.states().values()) == {"patched"}
    assert installed.apply() == []
    assert contents(installed) == patched
    assert installed.revert() == sorted(pristine)
    assert contents(installed) == pristine
    assert installed.revert() == []
    assert contents(installed) == pristine


def test_patched_files_keep_their_mode(installed):
    installed.apply()
    assert {(installed.site / path).stat().st_mode & 0o777 for path in installed.series.originals} == {0o640}


def test_the_patched_files_compile(installed):
    installed.apply()
    for path in installed.series.originals:
        compile((installed.site / path).read_bytes(), path, "exec")


def test_a_file_changed_by_somebody_else_stops_everything(installed):
    victim = installed.site / sorted(installed.series.originals)[-1]
    victim.write_bytes(victim.read_bytes().replace(b"\n", b"\n# mine\n", 1))
    before = contents(installed)
    for command in (installed.apply, installed.revert):
        with pytest.raises(PatchError, match="changed by something else, nothing was touched"):
            command()
    assert contents(installed) == before


def test_a_missing_file_stops_everything(installed):
    (installed.site / sorted(installed.series.originals)[0]).unlink()
    before = contents(installed)
    with pytest.raises(PatchError):
        installed.apply()
    assert contents(installed) == before


def test_a_failing_rename_leaves_nothing_half_done(installed, monkeypatch, pristine):
    replace, calls = os.replace, []

    def third_fails(source, target):
        calls.append(target)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(patch.os, "replace", third_fails)
    with pytest.raises(PatchError, match="nothing was changed"):
        installed.apply()
    assert contents(installed) == pristine


def test_an_interrupted_run_is_finished_by_the_next(installed, pristine):
    some = sorted(pristine)[:4]
    for path in some:
        (installed.site / path).write_bytes(installed.series.forward(path, pristine[path].decode()).encode())
    assert installed.apply() == sorted(set(pristine) - set(some))
    assert set(installed.states().values()) == {"patched"}


def test_a_hunk_at_another_line_is_refused():
    text = "--- a/x\n+++ b/x\n@@ -1,2 +1,3 @@\n one\n+new\n two\n"
    [diff] = parse("p", text)
    assert diff.apply("one\ntwo\n") == "one\nnew\ntwo\n"
    with pytest.raises(PatchError, match="x:1"):
        diff.apply("zero\none\ntwo\n")


def test_every_patch_says_why_and_until_when():
    """Style 19."""
    for name, _ in Series.load(VERSION).patches:
        head = (patch.SERIES / VERSION / name).read_text().partition("--- a/")[0]
        assert "Why:" in head and "Until:" in head, name


def test_git_takes_the_series_too(installed, pristine):
    if shutil.which("git") is None:
        pytest.skip("no git")
    for name, _ in installed.series.patches:
        file = patch.SERIES.resolve() / VERSION / name
        subprocess.run(["git", "apply", "--check", str(file)], cwd=installed.site, check=True)
        subprocess.run(["git", "apply", str(file)], cwd=installed.site, check=True)
    assert set(installed.states().values()) == {"patched"}


@pytest.mark.parametrize("version", ["0.5.9", "0.5.10", "0.5.23"])
def test_another_version_is_refused_by_name(monkeypatch, capsys, version):
    monkeypatch.setattr(patch.importlib.metadata, "version", lambda _: version)
    assert main(["apply"]) == 2
    assert f"sglang {version} is installed, supported: {VERSION}" in capsys.readouterr().err


def test_no_engine_is_said(monkeypatch, capsys):
    monkeypatch.setattr(patch.importlib.util, "find_spec", lambda _: None)
    assert main(["check"]) == 2
    assert "pip install sglang==" in capsys.readouterr().err


def test_check_tells_by_its_exit_status(installed, monkeypatch):
    monkeypatch.setattr(Installed, "find", classmethod(lambda cls: installed))
    assert main(["check"]) == 1
    assert main(["apply"]) == 0
    assert main(["check"]) == 0
    assert main(["revert"]) == 0
    (installed.site / sorted(installed.series.originals)[0]).write_text("foreign")
    assert main(["check"]) == 2


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "kvc.sglang.patch", "check"], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
