#!/usr/bin/env python3
"""Runs clang-tidy over the project's sources of a build folder.

    run_tidy.py BUILD [FILE...]   all sources of BUILD's compile commands, or those named
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys

from sources import FOLDERS


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    tool = shutil.which("clang-tidy-14") or shutil.which("clang-tidy")
    if not tool:
        sys.exit("clang-tidy: not found")
    build = pathlib.Path(sys.argv[1])
    root = pathlib.Path.cwd()
    wanted = {pathlib.Path(name).resolve() for name in sys.argv[2:]}
    files = set()
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = (pathlib.Path(entry["directory"]) / entry["file"]).resolve()
        ours = path.is_relative_to(root) and path.relative_to(root).parts[0] in FOLDERS
        if ours and (not wanted or path in wanted):
            files.add(path)
    if not files:
        sys.exit("run_tidy.py: no such sources in the compile commands")

    def tidy(path):
        command = [tool, "-p", str(build), "--quiet", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        return path, done.returncode, done.stdout

    failed = 0
    jobs = int(os.environ.get("DCP_JOBS") or os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for path, code, text in pool.map(tidy, sorted(files)):
            if code:
                failed += 1
                print(text.strip(), flush=True)
    print(f"clang-tidy: {len(files)} sources, {failed} with findings")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
