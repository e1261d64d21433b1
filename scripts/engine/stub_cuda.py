"""usage: stub_cuda.py SITE_PACKAGES

Called by setup-engine.sh. torch from the package index is linked against CUDA libraries that a machine without GPU never
calls but must find. For each soname that torch's objects need and nothing provides, this builds a library in torch/lib
with the symbols torch binds from it; every one returns 999 (CUDA's "unknown error").

Needs gcc, objdump. Running it again finds nothing to do.
"""

import re
import subprocess
import sys
import tempfile
from ctypes import CDLL
from pathlib import Path

# Undefined symbols without a version tag name no library; these are the ones that belong to CUDA. The dynamic linker
# searches all loaded libraries, so it does not matter which stub has them.
CUDA_NAME = re.compile(r"(cu|nccl|nv)[A-Za-z]")


def objdump(flag: str, path: Path) -> list[str]:
    return subprocess.run(["objdump", flag, path], check=True, capture_output=True, text=True).stdout.splitlines()


class Links:
    """What one shared object needs and defines."""

    def __init__(self, path: Path):
        self.needed: set[str] = set()
        self.tag_home: dict[str, str] = {}
        self.undefined: set[tuple[str, str]] = set()
        self.defined: set[str] = set()
        home = ""
        for line in objdump("-p", path):
            if found := re.match(r"\s+NEEDED\s+(\S+)", line):
                self.needed.add(found[1])
            elif found := re.match(r"\s+required from (\S+):", line):
                home = found[1]
            elif home and (found := re.match(r"\s+0x\w+ 0x\w+ \w+ (\S+)", line)):
                self.tag_home[found[1]] = home
        for line in objdump("-T", path):
            if not re.match(r"[0-9a-f]{16} ", line):
                continue
            flags, rest = line[17:24], line[25:].split()
            section, name = rest[0], rest[-1]
            tag = rest[2][1:-1] if rest[2].startswith("(") else ""  # else "Base": no version
            if section != "*UND*":
                self.defined.add(name)
            elif "w" not in flags:
                self.undefined.add((name, tag))


def loads(soname: str) -> bool:
    try:
        CDLL(soname)
    except OSError:
        return False
    return True


def build(target: Path, symbols: set[tuple[str, str]]) -> None:
    """A shared object `target` that defines exactly `symbols`, each (name, version tag or empty)."""
    code = [".text"]
    versions: dict[str, list[str]] = {}
    for name, tag in sorted(symbols):
        code.append(f".globl {name}\n.type {name},@function\n{name}:\n mov $999, %eax\n ret")
        if tag:
            versions.setdefault(tag, []).append(name)
    code.append('.section .note.GNU-stack,"",@progbits\n')
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.s"), Path(folder, "stub.map")
        source.write_text("\n".join(code))
        script.write_text("".join(f"{tag} {{ {'; '.join(names)}; }};\n" for tag, names in versions.items()))
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{target.name}", "-o", str(target), str(source)]
        subprocess.run(command + ([f"-Wl,--version-script={script}"] if versions else []), check=True)


def main(site: Path) -> None:
    lib = site / "torch" / "lib"
    ours = [*lib.glob("*.so*"), *site.glob("torch/_C*.so")]
    real = list(site.glob("nvidia/*/lib/*.so*"))
    links = [Links(path) for path in ours]
    defined = {name for link in [*links, *map(Links, real)] for name in link.defined}
    there = {path.name for path in ours + real}
    absent = sorted(so for so in {n for link in links for n in link.needed} - there if not loads(so))
    if not absent:
        return print("  no CUDA library is absent")
    wanted: dict[str, set[tuple[str, str]]] = {so: set() for so in absent}
    for link in links:
        for name, tag in link.undefined:
            if tag and link.tag_home.get(tag) in wanted:
                wanted[link.tag_home[tag]].add((name, tag))
            elif not tag and name not in defined and CUDA_NAME.match(name):
                wanted[absent[0]].add((name, ""))
    for soname, symbols in wanted.items():
        build(lib / soname, symbols)
    print(f"  {len(absent)} stub libraries, {sum(map(len, wanted.values()))} symbols")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
