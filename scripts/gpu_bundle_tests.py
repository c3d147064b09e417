"""ctest --show-only=json-v1 on standard input -> lines "label program timeout [arguments]".

One line for each test that runs on a GPU host as it stands: a program of the build's bin folder
(the argument) with label gpu or multi_gpu, or with label unit, nothing of the server in it and no
label concurrency (large programs that judge threads and time, which the GPU host says nothing about).
"""

import json
import os
import sys

NEEDS_SERVER = ("client_", "server_", "integration_")


def main() -> None:
    folder = os.path.realpath(sys.argv[1])
    for test in json.load(sys.stdin)["tests"]:
        command = test.get("command", [])
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        labels = properties.get("LABELS", [])
        if not command or os.path.realpath(os.path.dirname(command[0])) != folder:
            continue
        program = os.path.basename(command[0])
        if program.startswith(NEEDS_SERVER) or "sabotage" in labels or "long" in labels:
            continue
        for label in ("unit", "gpu", "multi_gpu"):
            if label in labels and (label != "unit" or "concurrency" not in labels):
                timeout = int(properties.get("TIMEOUT", 120))
                print(label, program, timeout, *command[1:])


main()
