"""``python -m engine.verifier.build -o podium-verify.pyz``: the verifier as one executable file.

It runs wherever Python 3.11 and ``cryptography`` are. Equal sources give equal bytes.
"""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

_SHEBANG = b"#!/usr/bin/env python3\n"
_MAIN = "import sys\n\nfrom engine.verifier.__main__ import main\n\nsys.exit(main())\n"
_LEFT_OUT = {"build.py"}


def archive() -> bytes:
    """The executable archive: this package's sources and nothing else."""
    folder = Path(__file__).parent
    sources = {
        f"engine/verifier/{path.name}": path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("*.py"))
        if path.name not in _LEFT_OUT
    }
    sources |= {"__main__.py": _MAIN, "engine/__init__.py": ""}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name, source in sorted(sources.items()):
            # The time of day must not be in it.
            file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), source, zipfile.ZIP_DEFLATED)
    return _SHEBANG + packed.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the archive."""
    parser = argparse.ArgumentParser(prog="python -m engine.verifier.build", description="Builds the verifier.")
    parser.add_argument("-o", "--output", type=Path, default=Path("podium-verify.pyz"), metavar="FILE")
    output: Path = parser.parse_args(arguments).output
    output.write_bytes(archive())
    output.chmod(0o755)
    sys.stdout.write(f"{output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
