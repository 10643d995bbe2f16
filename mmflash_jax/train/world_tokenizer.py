"""The small world's tokenizer, and its samples as token ids with labels.

In: a folder, for `write_tokenizer`; a `Sample`, for the others. Out: the files of a model folder
that have to do with text and pictures, and a sample's messages, prompt, answer ids and labels.
The tokenizer is byte-level, as the family's is: any text can be said, the world's words are one
token each, digits are single. The special tokens are the family's, in its order, and one for the
drafter's mask; the template speaks like the family's but opens no reasoning unless asked to.
It knows nothing of weights.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from mmflash_jax import byte_level
from mmflash_jax.chat import Chat
from mmflash_jax.processor import Prompt
from mmflash_jax.train.world import Label, Sample, sample
from mmflash_jax.train.world_draw import draw

VOCABULARY = 512  # rows of the embedding; those behind the special tokens are never used
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>",
           "<tool_response>", "</tool_response>", "<think>", "</think>", "<|mask|>")
PLAIN = SPECIAL[8:14]  # added, but shown in decoded text
WORD_SAMPLES = 4000  # so many that each wording of the world occurs

TEMPLATE = r"""{%- for message in messages -%}
  {%- if message.role not in ('system', 'user', 'assistant') -%}
    {{- raise_exception('Unknown role: ' ~ message.role) -}}
  {%- endif -%}
  {{- '<|im_start|>' ~ message.role ~ '\n' -}}
  {%- if message.role == 'assistant' -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type == 'text' -%}
        {{- part.text -}}
      {%- elif part.type in ('image', 'video') and message.role == 'user' -%}
        {{- '<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>' -}}
      {%- else -%}
        {{- raise_exception('No place for content of type ' ~ part.type) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n<think>\n' -}}
  {%- if not (enable_thinking | default(false)) -%}{{- '\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""


@functools.cache
def token_ids() -> dict[str, int]:
    """The id of each special token: a run without a gap, behind the words."""
    return {name: 256 + len(words()) + i for i, name in enumerate(SPECIAL)}


@functools.cache
def words() -> tuple[str, ...]:
    """The world's words in byte letters, with the space or punctuation that belongs to them."""
    samples = [sample(0, index, "train") for index in range(WORD_SAMPLES)]
    texts = {"user", "assistant", "system", "\n\n", *(one.question for one in samples),
             *(line for one in samples for line in one.text.splitlines(keepends=True))}
    split = byte_level.pre_tokenizer()
    found = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    return tuple(sorted(piece for piece in found if len(piece) > 1))


def write_tokenizer(folder: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja, preprocessor_config.json
    and generation_config.json (greedy) to `folder`, which must exist."""
    folder = Path(folder)
    ids = token_ids()
    vocabulary = {letter: i for i, letter in enumerate((*byte_level.LETTERS, *words()))}
    # A whole piece that is in the vocabulary needs no merges; any other is spelt in bytes.
    tokenizer = byte_level.build(vocabulary, [], ids, PLAIN, whole_words=True)
    if tokenizer.get_vocab_size() > VOCABULARY:
        raise AssertionError(f"{tokenizer.get_vocab_size()} tokens, expected at most {VOCABULARY}")
    tokenizer.save(str(folder / "tokenizer.json"))
    # Not the family's class: it would bring a split rule and merges of its own.
    _write(folder / "tokenizer_config.json", {
        "added_tokens_decoder": byte_level.added_tokens_decoder(ids, PLAIN),
        "bos_token": None, "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>", "model_max_length": 262144, "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None})
    _write(folder / "preprocessor_config.json", {
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_size": 2, "patch_size": 16,
        "temporal_patch_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 65536},
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor"})
    _write(folder / "generation_config.json", {
        "do_sample": False, "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"]})
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def messages(one: Sample, with_picture: bool = True) -> list[dict[str, Any]]:
    """The sample's question, its picture first; without it if it has none or is to have none."""
    content: list[dict[str, Any]] = [{"type": "text", "text": one.question}]
    if with_picture and one.scene.has_picture:
        content.insert(0, {"type": "image", "image": draw(one.scene)})
    return [{"role": "user", "content": content}]


def answer_tokens(one: Sample, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """The answer's ids (i32 [A]) and labels (i8 [A]); the last is `<|im_end|>`, a template token.

    `tokenizer` is transformers' around the one that `write_tokenizer` wrote. Raises ValueError if
    a token holds words of two labels.
    """
    text = one.text
    of_letter = np.concatenate([np.full(len(span.text), span.label, np.int8)
                                for span in one.answer])  # [letters]
    encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    labels = []
    for first, last in encoded.offsets:
        if text[first] == " " and last - first > 1:
            first += 1  # the space before a word is part of its token and says nothing
        inside = of_letter[first:last]
        if inside.min() != inside.max():
            raise ValueError(f"the token {text[first:last]!r} has words of two labels")
        labels.append(inside[0])
    end = tokenizer.backend_tokenizer.token_to_id("<|im_end|>")
    return (np.asarray([*encoded.ids, end], np.int32),
            np.asarray([*labels, Label.TEMPLATE], np.int8))


@dataclasses.dataclass(frozen=True)
class Example:
    """A sample as the target sees it."""

    prompt: Prompt  # ends where the answer begins
    ids: np.ndarray  # i32 [A] the answer, <|im_end|> at its end
    labels: np.ndarray  # i8 [A] a `Label` for each


def example(one: Sample, chat: Chat, with_picture: bool = True) -> Example:
    """The sample's prompt, answer and labels. Raises InputError if the prompt does not fit."""
    return Example(chat.build_prompt(messages(one, with_picture)),
                   *answer_tokens(one, chat.tokenizer))
