#!/usr/bin/env python3
"""Checks that docs/api.md lists exactly the error reasons of base/status.cc.

    check_reasons.py ROOT         compares the two lists below ROOT
    check_reasons.py --self-test  checks that a missing and an extra row are caught

A reason's row in docs/api.md starts with | `NAME` |; where its second cell is a code in backticks,
that code is compared as well.
"""

import pathlib
import re
import sys

ENTRY = re.compile(r'\{\s*Reason::k\w+\s*,\s*"([A-Z0-9_]+)"\s*,\s*k(\w+)\s*\}')
ROW = re.compile(r"^\|\s*`([A-Z][A-Z0-9_]*)`\s*\|(?:\s*`([A-Z_]+)`\s*\|)?", re.M)


def screaming(name):
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def compare(source, document):
    """What differs, a line each."""
    reasons = {name: screaming(code) for name, code in ENTRY.findall(source)}
    rows = ROW.findall(document)
    documented = dict(rows)
    if not reasons:
        return ["base/status.cc: found no reason table"]
    wrong = [f"docs/api.md: {name} is not listed" for name in reasons.keys() - documented.keys()]
    wrong += [
        f"docs/api.md: {name} is no reason of base/status.cc"
        for name in documented.keys() - reasons.keys()
    ]
    wrong += [
        f"docs/api.md: {name} has code {documented[name]}, base/status.cc has {reasons[name]}"
        for name in reasons.keys() & documented.keys()
        if documented[name] not in ("", reasons[name])
    ]
    if len(rows) != len(documented):
        wrong.append("docs/api.md: a reason is listed twice")
    return sorted(wrong)


def self_test():
    source = '{Reason::kShape, "SHAPE", kInvalidArgument},\n{Reason::kPage, "PAGE", kAborted},'
    shape = "| `SHAPE` | `INVALID_ARGUMENT` | text |\n"
    page = "| `PAGE` | text |\n"
    assert compare(source, shape + page) == []
    assert len(compare(source, shape)) == 1
    assert len(compare(source, shape + page + "| `EXTRA` | text |")) == 1
    assert len(compare(source, shape + "| `PAGE` | `OUT_OF_RANGE` |")) == 1
    assert len(compare(source, shape + page + page)) == 1
    assert len(compare("", shape)) == 1


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--self-test":
        self_test()
        return
    root = pathlib.Path(sys.argv[1])
    document = root / "docs/api.md"
    if not document.exists():
        sys.exit("docs/api.md: missing")
    wrong = compare(
        (root / "base/status.cc").read_text(encoding="utf-8"), document.read_text(encoding="utf-8")
    )
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
