"""The tokenizer of the tiny checkpoints: one id a byte, the family's special tokens, a template.

In: a folder. Out: tokenizer.json, tokenizer_config.json, chat_template.jinja in it. The chat
template is written from the description of the published one and behaves like it.
"""

import json
from pathlib import Path

from mmflash_jax import byte_level

# In the published order; a gap-free run after the 256 bytes. The last one serves as mask token.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>",
           "<tool_response>", "</tool_response>", "<think>", "</think>", "<|audio_start|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
         "</think>")  # added tokens that decoding keeps: not flagged special
TOKENS = {name: 256 + i for i, name in enumerate(SPECIAL)}
PAD_FROM = 256 + len(SPECIAL)  # ids from here to the vocabulary size are padding rows

TEMPLATE = r"""{%- set ns = namespace(images=0, videos=0, last_query=-1) -%}
{%- macro render(content, with_pictures) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is iterable -%}
    {%- for part in content -%}
      {%- if part.type in ('image', 'image_url') or 'image' in part -%}
        {%- if not with_pictures -%}
          {{- raise_exception('A system message cannot hold images.') -}}
        {%- endif -%}
        {%- set ns.images = ns.images + 1 -%}
        {%- if add_vision_id -%}{{- 'Picture ' ~ ns.images ~ ': ' -}}{%- endif -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' or 'video' in part -%}
        {%- if not with_pictures -%}
          {{- raise_exception('A system message cannot hold videos.') -}}
        {%- endif -%}
        {%- set ns.videos = ns.videos + 1 -%}
        {%- if add_vision_id -%}{{- 'Video ' ~ ns.videos ~ ': ' -}}{%- endif -%}
        {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- elif 'text' in part -%}
        {{- part.text -}}
      {%- else -%}
        {{- raise_exception('Unknown kind of content.') -}}
      {%- endif -%}
    {%- endfor -%}
  {%- elif content is not none -%}
    {{- raise_exception('Content is neither text nor a list.') -}}
  {%- endif -%}
{%- endmacro -%}
{%- if not messages -%}{{- raise_exception('No messages.') -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if ns.last_query < 0 -%}{{- raise_exception('No user query in the messages.') -}}{%- endif -%}
{%- if tools -%}
  {{- '<|im_start|>system\n# Tools\n\nThese functions may be called:\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' ~ (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools>\n\nCall one as <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n' -}}
  {{- '</parameter>\n</function>\n</tool_call>' -}}
  {%- if messages[0].role == 'system' -%}
    {%- set text = render(messages[0].content, false) | trim -%}
    {%- if text -%}{{- '\n\n' ~ text -}}{%- endif -%}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = render(message.content, message.role != 'system') | trim -%}
  {%- if message.role == 'system' -%}
    {%- if not loop.first -%}{{- raise_exception('System message must be first.') -}}{%- endif -%}
    {%- if not tools -%}{{- '<|im_start|>system\n' ~ content ~ '<|im_end|>\n' -}}{%- endif -%}
  {%- elif message.role == 'user' -%}
    {{- '<|im_start|>user\n' ~ content ~ '<|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- if message.reasoning_content is string -%}
      {%- set reasoning = message.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- else -%}
      {%- set reasoning = '' -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.last_query -%}
      {{- '<think>\n' ~ (reasoning | trim) ~ '\n</think>\n\n' -}}
    {%- endif -%}
    {{- content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set call = call.function or call -%}
      {{- '\n\n' if loop.first and content else '' if loop.first else '\n' -}}
      {{- '<tool_call>\n<function=' ~ call.name ~ '>\n' -}}
      {%- for key, value in call.arguments | items -%}
        {%- set value = value if value is string else value | tojson -%}
        {{- '<parameter=' ~ key ~ '>\n' ~ value ~ '\n</parameter>\n' -}}
      {%- endfor -%}
      {{- '</function>\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- raise_exception('Unknown role: ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n<think>\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '\n</think>\n\n' -}}
  {%- endif -%}
{%- endif -%}
"""


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to `folder`."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_level.LETTERS)}
    tokenizer = byte_level.build(vocabulary, [], TOKENS, PLAIN)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "add_prefix_space": False,
        "added_tokens_decoder": byte_level.added_tokens_decoder(TOKENS, PLAIN), "bos_token": None,
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": 262144, "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None}, indent=2) + "\n",
        encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
