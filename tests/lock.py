"""Locks every dependency with hashes, for all supported Pythons and platforms: `make lock`.

uv does the resolving, in an environment of its own; it is not needed for anything else.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADERS = {
    "requirements.lock": "# Runtime dependencies with hashes, for every Python and platform we support. Made by: make lock\n",
    "tests/requirements.lock": "# What the tests install, runtime dependencies included. Made by: make lock\n",
}


def main() -> int:
    """Write both lock files."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
        tests = Path(folder) / "tests.in"
        tests.write_text("\n".join(groups["tests"]) + "\n")
        for name, inputs in (("requirements.lock", []), ("tests/requirements.lock", [tests])):
            locked = subprocess.run(
                [
                    python, "-m", "uv", "pip", "compile", "--universal", "--python-version", "3.11",
                    "--generate-hashes", "--no-header", "--no-annotate", "--quiet", "pyproject.toml", *inputs,
                ],
                cwd=ROOT,
                check=True,
                capture_output=True,
                text=True,
            ).stdout  # fmt: skip
            (ROOT / name).write_text(HEADERS[name] + locked)
            print(f"{name}: {locked.count('==')} packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
