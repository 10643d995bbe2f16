"""Write a random-weight pair of a published geometry in the HF layout, for timing.

    python scripts/make_random_checkpoint.py --geometry qwen3.5-9b --tokenizer DIR OUT

OUT/target and OUT/draft are then what `python -m mmflash_jax.generate` takes. --tokenizer is a
folder from `scripts/make_tokenizer.py`. Its answers mean nothing: the weights are random.
"""

import argparse
import shutil
from pathlib import Path

import jax

from mmflash_jax.config import PRESETS, drafter_preset
from ports.dflash import save_drafter
from ports.qwen35 import save_target
from ports.random_params import random_drafter, random_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=sorted(PRESETS), default="qwen3.5-9b")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    config = PRESETS[args.geometry]
    drafter = drafter_preset(config)
    keys = jax.random.split(jax.random.key(0))
    save_target(random_target(config, keys[0], mtp=True), config, args.out / "target")
    save_drafter(random_drafter(drafter, keys[1]), drafter, args.out / "draft", config)
    for path in args.tokenizer.iterdir():
        if path.name != "config.json":
            shutil.copy(path, args.out / "target" / path.name)


if __name__ == "__main__":
    main()
