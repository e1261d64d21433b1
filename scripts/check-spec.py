"""usage: check-spec.py

Called by lint.sh. Reads the tables of SPECIFICATION.md and fails when a rule is missing or stands twice, when a row names
neither a test nor "pending", or when a named test is not in the sources. A test is written `path::function`.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = {
    "ROUTE": range(1, 10), "ADM": range(1, 15), "DISP": range(1, 10), "EAR": range(1, 8), "OWN": range(1, 8),
    "SES": range(1, 8), "XFER": range(1, 11), "SYNC": range(1, 5), "MIG": range(1, 5), "INV": range(1, 4), "THM": [2],
}  # fmt: skip
WANTED = {f"{name}-{i}" for name, numbers in RULES.items() for i in numbers} | {f"F{i}" for i in range(1, 22)}
ROW = re.compile(r"^\| ([A-Z]+-?\d+) \| (.+) \| (.+) \|$")
TEST = re.compile(r"`([^`\s]+)::([A-Za-z0-9_]+)`")


def problems(text: str) -> list[str]:
    found: list[str] = []
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        row = ROW.match(line)
        if not row:
            continue
        rule, _, tests = row.groups()
        at = f"SPECIFICATION.md:{number}: {rule}"
        if rule in seen:
            found.append(f"{at} stands twice")
        seen.add(rule)
        named = TEST.findall(tests)
        if not named and "pending" not in tests:
            found.append(f"{at} names no test and is not pending")
        found += [f"{at}: {path}::{name} does not exist" for path, name in named if not exists(path, name)]
    found += [f"SPECIFICATION.md lacks {rule}" for rule in sorted(WANTED - seen)]
    found += [f"SPECIFICATION.md: {rule} is no rule" for rule in sorted(seen - WANTED)]
    return found


def exists(path: str, name: str) -> bool:
    file = ROOT / path
    word = "def" if path.endswith(".py") else "fn"
    return file.is_file() and re.search(rf"\b{word} {name}\b", file.read_text()) is not None


if __name__ == "__main__":
    wrong = problems((ROOT / "SPECIFICATION.md").read_text())
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)
