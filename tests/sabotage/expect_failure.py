#!/usr/bin/env python3
"""Passes when a Catch2 suite fails a check (not when it crashes) under a named fault."""
import os
import re
import subprocess
import sys

fault = os.environ["DCP_SABOTAGE_FAULT"]
run = subprocess.run([sys.argv[1], "--abort"], capture_output=True, text=True, timeout=590)
caught = re.search(r"-{20,}\n(.+)\n-{20,}\n.*\n\.{20,}\n\n.*FAILED:", run.stdout)
if run.returncode != 0 and caught and "SIG" not in run.stdout:
    print(f"{fault}: caught by \"{caught[1].strip()}\"")
    sys.exit(0)
print(run.stdout[-3000:])
print(f"{fault}: the suite did not fail a check (exit {run.returncode})")
sys.exit(1)
