"""usage: wheel_digest.py WHEEL

Called by setup-engine.sh: one hash over the names and contents of a wheel, without the times a zip file carries.
"""

import hashlib
import sys
import zipfile

digest = hashlib.sha256()
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for entry in sorted(wheel.infolist(), key=lambda e: e.filename):
        digest.update(f"{entry.filename} {entry.CRC:08x} {entry.file_size}\n".encode())
print(digest.hexdigest()[:16])
