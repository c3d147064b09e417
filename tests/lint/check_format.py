#!/usr/bin/env python3
"""Checks all sources with clang-format, or formats them.

    check_format.py [--fix] ROOT   the clang-format of $CLANG_FORMAT, else of the PATH

Versions of clang-format differ in taste; the project's is 14, Debian 12's.
"""

import os
import re
import shutil
import subprocess
import sys

from sources import sources

VERSION = "14"


def main():
    arguments = sys.argv[1:]
    fix = "--fix" in arguments
    arguments = [argument for argument in arguments if argument != "--fix"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    root = arguments[0]
    name = os.environ.get("CLANG_FORMAT") or f"clang-format-{VERSION}"
    tool = shutil.which(name) or shutil.which("clang-format")
    if not tool:
        sys.exit("clang-format: not found")
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"version (\d+)", said)
    if not version or version.group(1) != VERSION:
        sys.exit(f"{tool}: {said.strip()}; expected version {VERSION}")
    files = [str(path) for path in sources(root)]
    command = [tool, "--style=file", *(["-i"] if fix else ["--dry-run", "--Werror"]), *files]
    done = subprocess.run(command, cwd=root, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        places = re.findall(r"^(.+?:\d+):\d+: error", done.stderr, re.M)
        print(*dict.fromkeys(places) or [done.stderr], sep="\n")
        print("clang-format: the lines above differ; scripts/lint --fix formats them")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
