"""Benchmarks on random weights of the published geometries: `python -m mmflash_jax.bench`.

    decode    plain decoding, one token a slot and step      round    draft, verify, accept, commit
    prefill   a prompt with a picture: vision and target     load     a checkpoint from files

Random weights accept about one token a round, so these are times of rounds, never tokens a second
of a real pair. Every command prints a table and, with --json, keeps the rows in a file.
"""

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

import jax

from mmflash_jax.bench import measure
from mmflash_jax.config import PRESETS


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m mmflash_jax.bench", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, random: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text,
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        if random:
            sub.add_argument("--geometry", choices=sorted(PRESETS), nargs="+",
                             default=["qwen3.5-9b"], help="whose sizes the random weights have")
        sub.add_argument("--json", type=Path, metavar="FILE", help="keep the rows in FILE")
        return sub

    def sizes(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--slots", type=int, nargs="+", default=[1], help="requests in flight")
        sub.add_argument("--context", type=int, nargs="+", default=[1024],
                         help="committed tokens of each slot")
        sub.add_argument("--repeat", type=int, default=200, help="rounds to time")

    sizes(command("decode", "plain decoding: one token for each slot and step"))
    pair = command("round", "speculative decoding: one round of draft and verify")
    sizes(pair)
    pair.add_argument("--width", type=int, choices=(4, 8, 16), default=16,
                      help="rows verified for each slot")
    pair.add_argument("--with-decode", action="store_true",
                      help="time plain decoding of the same weights too")
    fill = command("prefill", "a prompt of one picture and text, from patches to the first token")
    fill.add_argument("--context", type=int, nargs="+", default=[1024], help="prompt tokens")
    fill.add_argument("--repeat", type=int, default=20, help="prompts to time")
    load = command("load", "load a target (and a drafter) from files", random=False)
    load.add_argument("--target", type=Path, required=True, help="HF folder of the target")
    load.add_argument("--draft", type=Path, help="HF folder of the drafter")
    return root


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    rows = measure.load(args.target, args.draft) if args.command == "load" else []
    for name in getattr(args, "geometry", ()):
        if args.command in ("decode", "round"):
            both = args.command == "round" and args.with_decode
            rows += measure.rounds(
                name, width=1 if args.command == "decode" else args.width, slots=args.slots,
                contexts=args.context, repeat=args.repeat, with_decode=both)
        else:
            rows += measure.prefill(name, contexts=args.context, repeat=args.repeat)
    print(measure.table(rows))
    if args.json:
        keep(args.json, rows, "python -m mmflash_jax.bench " + shlex.join(argv or sys.argv[1:]))
    return 0


def keep(path: Path, rows: list[dict], command: str) -> None:
    """Write rows with what is needed to repeat and to judge them."""
    device = jax.devices()[0]
    packages = {name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax", "numpy")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "command": command, "date": datetime.date.today().isoformat(),
        "card": device.device_kind, "versions": packages, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
