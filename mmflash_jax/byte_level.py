"""The family's byte-level tokenizer around any vocabulary.

In: tokens and merges in byte letters, and the added tokens. Out: a `tokenizers.Tokenizer`, and
what tokenizer_config.json says of the added tokens. Knows no files and no particular vocabulary.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mmflash_jax.detokenize import BYTES

LETTERS = tuple(sorted(BYTES, key=BYTES.__getitem__))  # the letter of each byte
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
         r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def pre_tokenizer() -> Any:
    """Splits a text into words of byte letters, as the published tokenizers do."""
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def build(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], added: Mapping[str, int],
          plain: Collection[str], whole_words: bool = False) -> Tokenizer:
    """A BPE tokenizer with NFC and the family's split. `added`: name -> id, of which decoding
    shows those in `plain`. `whole_words`: a word in the vocabulary needs no merges. Raises
    ValueError if an added token does not get its id."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges),
                                     ignore_merges=whole_words))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=name not in plain, normalized=False)
                          for name in sorted(added, key=added.__getitem__)])
    for name, wanted in added.items():
        if tokenizer.token_to_id(name) != wanted:
            raise ValueError(f"{name} got id {tokenizer.token_to_id(name)}, expected {wanted}")
    return tokenizer


def added_tokens_decoder(added: Mapping[str, int], plain: Collection[str]) -> dict[str, dict]:
    """The field of this name in tokenizer_config.json."""
    return {str(i): {"content": name, "lstrip": False, "normalized": False, "rstrip": False,
                     "single_word": False, "special": name not in plain}
            for name, i in added.items()}
