"""`python -m kvc.sglang.patch apply|check|revert`.

apply   patches the installed SGLang; does nothing if it is patched already
check   exit status 0 if it is patched, 1 if it is not, 2 if it cannot be
revert  restores the files of the wheel byte for byte
"""

from __future__ import annotations

import argparse
import sys

from kvc.sglang.patch import Installed, PatchError


def main(argv: list[str] | None = None) -> int:
    """Runs one command; the exit status is 0, 1 (`check`: not patched) or 2 (refused)."""
    parser = argparse.ArgumentParser(prog="python -m kvc.sglang.patch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=["apply", "check", "revert"])
    command = parser.parse_args(argv).command
    try:
        installed = Installed.find()
        name = f"sglang {installed.series.version} in {installed.site}"
        if command == "apply":
            changed = installed.apply()
            print(f"patched: {name}: {len(changed)} files" if changed else f"already patched: {name}")
        elif command == "revert":
            changed = installed.revert()
            print(f"reverted: {name}: {len(changed)} files" if changed else f"not patched: {name}")
        else:
            return _check(installed, name)
    except PatchError as error:
        print(f"kvc.sglang.patch: {error}", file=sys.stderr)
        return 2
    return 0


def _check(installed: Installed, name: str) -> int:
    states = installed.states()
    kinds = set(states.values())
    if kinds == {"patched"}:
        print(f"patched: {name}")
        return 0
    if kinds == {"original"}:
        print(f"not patched: {name}")
        return 1
    for path, state in states.items():
        print(f"{state:9} {path}", file=sys.stderr)
    if "foreign" in kinds:
        raise PatchError(f"changed by something else: reinstall sglang=={installed.series.version}")
    raise PatchError("half patched by an interrupted run: apply or revert again")


if __name__ == "__main__":
    sys.exit(main())
