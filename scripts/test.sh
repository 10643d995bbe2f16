#!/usr/bin/env bash
# Set up both environments and run every check that needs no card.
#
#   .venv          Python 3.12 where there is one: ruff, mypy, pytest
#   .venv-oracle   Python 3.11 with torch: tests/parity, live against the torch models
#
# Without a Python 3.11 parity is checked against the committed reference outputs only, and the
# last lines say so; with --strict that, or a missing Python 3.12, is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

strict=
case "$*" in
    "") ;;
    --strict) strict=yes ;;
    *) echo "usage: scripts/test.sh [--strict], not: $*" >&2 && exit 2 ;;
esac
if [ -n "$strict" ]; then
    for version in 3.12 3.11; do
        if ! find_python "$version" >/dev/null; then
            echo "--strict, but no usable Python $version (with venv and ensurepip) found" >&2
            exit 1
        fi
    done
fi

if ! python=$(find_python 3.12) && ! python=$(find_python 3.11); then
    echo "no usable Python 3.12 or 3.11 (with venv and ensurepip) found" >&2
    exit 1
fi
set_up .venv "$python" dev $(card_extra)
oracle=$(find_python 3.11) || oracle=
if [ -n "$oracle" ]; then set_up .venv-oracle "$oracle" oracle; fi

.venv/bin/ruff check
.venv/bin/mypy
.venv/bin/python -m pytest -q
if [ -n "$oracle" ]; then
    .venv-oracle/bin/python -m pytest -q tests/parity
else
    echo
    echo "NOT CHECKED: live parity with the torch models, because no Python 3.11 was found."
    echo "NOT CHECKED: parity was compared with committed reference outputs only."
fi
