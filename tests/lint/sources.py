"""The files that the lint checks look at."""

import pathlib

FOLDERS = ("base", "kernels", "comm", "runtime", "server", "client", "tests", "bench")
SUFFIXES = (".h", ".cc", ".cu", ".cuh")


def sources(root):
    """Paths of all C++ and CUDA sources below root, relative to it, sorted."""
    root = pathlib.Path(root)
    return sorted(
        path.relative_to(root)
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    )
