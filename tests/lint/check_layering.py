#!/usr/bin/env python3
"""Checks who may include whom.

    check_layering.py ROOT         checks the sources below ROOT
    check_layering.py --self-test  plants bad includes and checks that each is caught
"""

import pathlib
import re
import sys
import tempfile

from sources import FOLDERS, sources

# Which layers a layer may include, beside itself.
LAYERS = {
    "base": (),
    "kernels": ("base",),
    "comm": ("base",),
    "runtime": ("base", "kernels", "comm"),
    "server": ("base", "runtime"),
    "client": ("base",),
}
# Tests of a layer see what the layer sees, and tests/. These see everything:
FREE = ("server", "client", "integration", "find_package")
SUPPORT = ("base", "kernels", "comm", "runtime")
# The one part of client/ that knows no protobuf and that all tests may use.
WORKLOAD = "client/workload/"

PROTO = re.compile(r"^(grpc|grpc\+\+|grpcpp|google|dcp/v\d+)/|\.pb\.h$")
# Of the programs only; an installed library must not need them.
PROGRAM_LIBRARIES = re.compile(r"^(CLI|toml\+\+|nlohmann)/|^(toml|json)\.hpp$")
CUDA = re.compile(
    r"^(cuda|cub|thrust|cutlass|cute|cooperative_groups|nccl|nvtx3|nvml)(/|[\w.]*\.(h|hpp|cuh)$|$)"
    r"|^(device_launch_parameters|vector_types|mma)\.h$"
)
CUDA_FILES = re.compile(r"\.(cu|cuh)$|^base/cuda[^/]*$|^comm/nccl[^/]*$")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def without_comments(text):
    """Block comments blanked, line numbers kept."""
    return re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)


def allowed_layers(path):
    """The folders whose headers the file may include; None for all."""
    top = path.parts[0]
    if top in LAYERS:
        return (top, *LAYERS[top])
    if top == "bench":
        return None
    below = path.parts[1] if len(path.parts) > 2 else ""
    if below in FREE:
        return None
    if below in LAYERS:
        return ("tests", below, *LAYERS[below])
    return ("tests", *SUPPORT)


def may_use_proto(path):
    if path.as_posix().startswith(WORKLOAD):
        return False
    return allowed_layers(path) is None or path.parts[0] in ("server", "client")


def broken_rule(path, quote, name):
    """The rule that this include breaks, or None."""
    if ".." in pathlib.PurePosixPath(name).parts:
        return "an include is a path from the top folder, without .."
    if PROTO.search(name):
        return None if may_use_proto(path) else "protobuf and gRPC are for server/ and client/"
    if PROGRAM_LIBRARIES.search(name):
        programs = allowed_layers(path) is None or path.parts[0] in ("server", "client")
        return None if programs else "CLI11, toml++ and JSON are for server/ and client/"
    if CUDA.search(name):
        if CUDA_FILES.search(path.as_posix()):
            return None
        return "CUDA headers only in .cu, .cuh, base/cuda.*, comm/nccl.*"
    first = name.split("/")[0]
    if first in FOLDERS and "/" in name:
        if quote == "<":
            return "own headers are included in quotes"
        allowed = allowed_layers(path)
        if path.parts[0] == "tests" and name.startswith(WORKLOAD):
            return None
        if allowed is not None and first not in allowed:
            return f"{'/'.join(path.parts[:-1])} may include {', '.join(allowed)} only"
        below_proto = path.as_posix().startswith(WORKLOAD)
        if below_proto and first == "client" and not name.startswith(WORKLOAD):
            return f"{WORKLOAD} includes nothing else of client/"
    elif quote == '"' and "/" not in name:
        return "an own include is a path from the top folder"
    return None


def check(root):
    """Prints every broken rule below root; returns how many."""
    broken = 0
    for path in sources(root):
        text = without_comments((pathlib.Path(root) / path).read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            match = INCLUDE.match(line)
            rule = match and broken_rule(path, *match.groups())
            if rule:
                print(f'{path}:{number}: "{match.group(2)}": {rule}')
                broken += 1
    return broken


GOOD = {
    "base/a.h": "#include <string>",
    "kernels/a.cc": '#include "kernels/a.h"\n#include "base/a.h"\n#include "hwy/highway.h"',
    "runtime/a.cc": '#include "comm/a.h"\n#include "kernels/a.h"',
    "server/a.cc": '#include "dcp/v1/decode.grpc.pb.h"\n#include "runtime/a.h"\n#include <CLI/CLI.hpp>',
    "client/a.cc": '#include <grpcpp/grpcpp.h>\n#include "base/a.h"',
    "comm/nccl.cc": "#include <nccl.h>\n#include <cuda_runtime.h>",
    "kernels/a.cu": "#include <cuda_bf16.h>\n#include <cooperative_groups.h>",
    "tests/runtime/a_test.cc": '#include "tests/support/a.h"\n#include "kernels/a.h"',
    "client/workload/a.cc": '#include "client/workload/a.h"\n#include <nlohmann/json.hpp>',
    "tests/runtime/b_test.cc": '#include "client/workload/a.h"',
    "tests/integration/a_test.cc": '#include "client/a.h"\n#include "dcp/v1/decode.pb.h"',
    "bench/a.cc": '#include "client/a.h"\n#include "kernels/a.h"',
    "comm/comment.cc": '// #include "kernels/a.h"\n/*\n#include "kernels/a.h"\n*/',
}
BAD = [
    ("base/a.h", '#include "comm/a.h"'),
    ("kernels/a.h", '#include "comm/a.h"'),
    ("comm/a.h", '#  include "kernels/a.h"'),
    ("kernels/a.cc", '#include "runtime/a.h"'),
    ("runtime/a.cc", '#include "server/a.h"'),
    ("runtime/a.cc", '#include "dcp/v1/decode.pb.h"'),
    ("runtime/a.cc", "#include <grpcpp/grpcpp.h>"),
    ("base/a.cc", "#include <google/protobuf/message.h>"),
    ("runtime/a.cc", "#include <nlohmann/json.hpp>"),
    ("runtime/a.cc", "#include <toml++/toml.h>"),
    ("server/a.cc", '#include "client/a.h"'),
    ("server/a.cc", '#include "kernels/a.h"'),
    ("client/a.cc", '#include "runtime/a.h"'),
    ("client/workload/a.cc", '#include "dcp/v1/decode.pb.h"'),
    ("client/workload/a.cc", '#include "client/cpp/a.h"'),
    ("runtime/a.cc", '#include "client/workload/a.h"'),
    ("tests/runtime/a_test.cc", '#include "client/cpp/a.h"'),
    ("kernels/a.cc", "#include <cuda_runtime.h>"),
    ("runtime/a.h", "#include <cuda/std/atomic>"),
    ("comm/in_process.cc", "#include <nccl.h>"),
    ("base/a.cc", '#include "a.h"'),
    ("base/a.cc", '#include "../comm/a.h"'),
    ("base/a.cc", "#include <base/a.h>"),
    ("runtime/a.cc", '#include "tests/support/a.h"'),
    ("tests/kernels/a_test.cc", '#include "comm/a.h"'),
    ("tests/runtime/a_test.cc", '#include "dcp/v1/decode.pb.h"'),
]


def self_test():
    failures = 0
    for files, expected in [(GOOD, 0)] + [({path: text}, 1) for path, text in BAD]:
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                target = pathlib.Path(root) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text("#pragma once\n" + text + "\n", encoding="utf-8")
            found = check(root)
            if found != expected:
                print(f"self-test: expected {expected} broken rules, found {found} in {files}")
                failures += 1
    return failures


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--self-test":
        sys.exit(1 if self_test() else 0)
    if not sources(sys.argv[1]):
        sys.exit(f"no sources below {sys.argv[1]}")
    sys.exit(1 if check(sys.argv[1]) else 0)


if __name__ == "__main__":
    main()
