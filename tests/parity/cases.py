"""What parity is checked on: tiny checkpoints and prompts, the same on every machine.

In: names. Out: checkpoint folders (through tests.tiny) and `Case`s: ids, patches and grids. Plain
numpy; nothing here knows an oracle or the model code.
"""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests import tiny
from tests.tiny_tokenizer import TOKENS

# Keyword arguments of tests.tiny.write_target
TARGETS: dict[str, dict] = {
    "plain": {"seed": 11, "layers": 6, "interval": 3},
    "triple": {"seed": 12, "heads": 6, "kv_heads": 2, "value_heads": 6, "key_heads": 2,
               "key_dim": 24, "value_dim": 16, "hidden": 48, "intermediate": 72},
    "tied": {"seed": 13, "tied": True, "interval": 2},
    "yarn": {"seed": 14, "interval": 2, "max_positions": 256,
             "yarn": {"factor": 4.0, "original_max_position_embeddings": 64}},
    "letters": {"seed": 15, "letters": 2, "layers": 6, "interval": 3},
}

# Name of the target's case and keyword arguments of tests.tiny.write_drafter
DRAFTERS: dict[str, tuple[str, dict]] = {
    "full": ("plain", {"seed": 21, "layers": 3, "taps": (0, 2, 4)}),
    "sliding": ("plain", {"seed": 22, "layers": 2, "taps": (3, 1), "window": 12,
                          "layer_types": ("sliding_attention",) * 2}),
    "mixed": ("plain", {"seed": 23, "layers": 3, "taps": (1, 4), "window": 9,
                        "layer_types": ("sliding_attention", "sliding_attention",
                                        "full_attention")}),
    # A window of at least the block: below that, `dflash` also bounds how far a row sees ahead
    # inside the block, while SGLang and vLLM do not; no published drafter comes near.
    "sliding_open": ("plain", {"seed": 24, "layers": 2, "taps": (1, 3), "window": 17,
                               "is_causal": False, "heads": 4, "kv_heads": 4,
                               "layer_types": ("sliding_attention", "full_attention")}),
    "letters": ("letters", {"seed": 25, "layers": 3, "taps": (0, 2, 4)}),
    "letters_mixed": ("letters", {"seed": 26, "layers": 2, "taps": (1, 4), "window": 20,
                                  "layer_types": ("sliding_attention", "full_attention")}),
}

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Wie spät ist es? 12:45 Uhr.",
    "a",
    "def f(x):\n    return x ** 2 + 1\n",
    "图中有几只猫? 为什么?",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597",
    "It was the best of times, it was the worst of times, it was the age of wisdom, "
    "it was the age of foolishness, it was the epoch of belief",
    "ZZZZZZZZZZZZZZZZ",
    "Σ x_i = 0 ⇒ x ∈ ker(A)",
    "user: hello!\nassistant: hi.\nuser: how many are 3 and 4?\nassistant:",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One prompt. `kinds[i]` is "image" or "video"; its patches are [t*h*w, 1536] in merge-block
    order, its grid (t, h, w) in patches."""

    ids: np.ndarray  # [T] int32, pads expanded
    kinds: tuple[str, ...] = ()
    patches: tuple[np.ndarray, ...] = ()
    grids: tuple[tuple[int, int, int], ...] = ()


def text(words: str) -> Case:
    """A prompt of plain text: one id a byte."""
    return Case(np.frombuffer(words.encode(), np.uint8).astype(np.int32))


def _picture(seed: int, grid: tuple[int, int, int]) -> np.ndarray:
    state = np.random.RandomState(seed)
    rows = 2 * state.random_sample((int(np.prod(grid)), 3, 2, 16, 16)) - 1
    if grid[0] == 1:
        rows[:, :, 1] = rows[:, :, 0]  # an image is its own second frame
    return rows.reshape(len(rows), -1).astype(np.float32)


def _mixed(*parts) -> Case:
    """Parts are text, or (kind, seed, grid); a video gets a time stamp before every frame."""
    ids: list[int] = []
    kinds, patches, grids = [], [], []
    start, end = TOKENS["<|vision_start|>"], TOKENS["<|vision_end|>"]
    for part in parts:
        if isinstance(part, str):
            ids += part.encode()
            continue
        kind, seed, grid = part
        pads = [TOKENS[f"<|{kind}_pad|>"]] * (grid[1] * grid[2] // 4)
        for frame in range(grid[0]):
            ids += f"<{frame + 0.5:.1f} seconds>".encode() if kind == "video" else b""
            ids += [start, *pads, end]
        kinds.append(kind)
        patches.append(_picture(seed, grid))
        grids.append(grid)
    return Case(np.asarray(ids, np.int32), tuple(kinds), tuple(patches), tuple(grids))


def prompts() -> dict[str, Case]:
    """The prompts by name: text across chunk borders, one image, two images, a video."""
    return {
        "text": text(TEXTS[6]),
        "image": _mixed("Look: ", ("image", 31, (1, 4, 10)), " What is it?"),
        "two_images": _mixed(("image", 32, (1, 8, 6)), "or", ("image", 33, (1, 2, 4)), "?"),
        "video": _mixed("See ", ("video", 34, (3, 4, 6)), " and tell."),
        "image_and_video": _mixed(("video", 35, (2, 2, 4)), ("image", 36, (1, 6, 4)), "now"),
    }


def prompts_of(target: str) -> dict[str, Case]:
    """The prompts that are checked on the target case `target`: all of them on one of them."""
    every = prompts()
    return every if target == "plain" else {name: every[name] for name in ("text", "image")}


def write_target(name: str, folder: Path) -> Path:
    """Write the target case `name` to `folder`/target; returns that folder."""
    tiny.write_target(folder / "target", **TARGETS[name])
    return folder / "target"


def write_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """Write the drafter case `name` and its target; returns the folders (target, drafter)."""
    target, options = DRAFTERS[name]
    fields = tiny.write_target(folder / "target", **TARGETS[target])
    tiny.write_drafter(folder / "drafter", fields, **options)
    return folder / "target", folder / "drafter"


def context_features(name: str, length: int) -> np.ndarray:
    """Random target outputs at the taps, [length, taps * H] float32, for drafter case `name`."""
    target, options = DRAFTERS[name]
    width = tiny.target_fields(**_sizes(TARGETS[target]))["text_config"]["hidden_size"]
    state = np.random.RandomState(41 + length)
    return (4 * state.random_sample((length, len(options["taps"]) * width)) - 2
            ).astype(np.float32)


def fingerprint(folder: Path) -> str:
    """A hash of a checkpoint's configuration and tensors: what a reference was computed for."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    tensors: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    return digest.hexdigest()


def _sizes(options: dict) -> dict:
    return {k: v for k, v in options.items() if k not in ("seed", "letters")}
