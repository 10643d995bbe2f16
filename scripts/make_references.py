"""Write the committed reference outputs of the torch oracles, tests/parity/references/*.npz.

Run in the environment that has torch: `.venv-oracle/bin/python scripts/make_references.py`.
Needed whenever the tiny checkpoints or the prompts of the parity tests change; the tests say so.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.parity import references

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP",
                        help=f"which of {', '.join(references.GROUPS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=references.FOLDER)
    args = parser.parse_args()
    unknown = set(args.groups) - set(references.GROUPS)
    if unknown:
        parser.error(f"unknown group {sorted(unknown)}, expected {list(references.GROUPS)}")
    for group in args.groups or references.GROUPS:
        file = references.save(group, args.folder)
        print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
