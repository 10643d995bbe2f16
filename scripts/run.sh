#!/usr/bin/env bash
# Set up .venv and run the main job: a picture and a question in, the target's own answer out.
#
#   scripts/run.sh --target DIR --draft DIR --image FILE --prompt TEXT
#
# Arguments are those of `python -m mmflash_jax.generate`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
caller=$PWD
cd "$root"
source scripts/environment.sh

if ! python=$(find_python 3.12) && ! python=$(find_python 3.11); then
    echo "no usable Python 3.12 or 3.11 (with venv and ensurepip) found" >&2
    exit 1
fi
set_up .venv "$python" $(card_extra)
cd "$caller" # paths in the arguments are the caller's
exec "$root/.venv/bin/python" -m mmflash_jax.generate "$@"
