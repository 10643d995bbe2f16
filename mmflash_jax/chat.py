"""Messages to a prompt: chat template, picture slots, token ids; and what ends an answer.

In: the tokenizer, template and settings files of a model folder, and OpenAI-style messages.
Out: `Prompt`; stop ids; the checkpoint's sampling defaults. The way back, ids to text and
reasoning, is `detokenize.py`.
Nothing is truncated: a prompt that does not fit is refused before any pixel is touched (R47).
It knows nothing of weights, devices or sampling, and fetches nothing from a network.
"""

import dataclasses
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmflash_jax.config import TargetConfig, read_json
from mmflash_jax.detokenize import THINK, THINK_END, TextStream, TokenBytes
from mmflash_jax.images import InputError, Source, image_size, load_video, source_name
from mmflash_jax.processor import (
    Picture,
    Pixels,
    Prompt,
    Settings,
    image_grid,
    picture_of_image,
    picture_of_video,
    plan_video,
    positions_3d,
    read_settings,
    with_limits,
)

LOW_DETAIL_PIXELS = 512 * 512  # OpenAI's `detail: low`: one tile of 512 x 512
VISION_ITEMS = {"image": ("image", "path", "url"), "image_url": ("image_url",),
                "video": ("video", "path", "url"), "video_url": ("video_url",)}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A picture or video that the messages name, not yet opened."""

    kind: str  # "image" or "video"
    source: Source
    min_pixels: int | None
    max_pixels: int | None


@dataclasses.dataclass(frozen=True)
class _Planned:
    """What is known of a slot from its header: the text of its pads, and how to read it."""

    text: str
    pads: int
    read: Callable[[], Picture]


class Chat:
    """The text side of a model folder. Raises InputError if the folder's files are missing,
    broken, or at odds with `config`."""

    def __init__(self, folder: str | Path, config: TargetConfig):
        self.folder = Path(folder)
        self.config = config
        self.tokenizer = load_tokenizer(self.folder)
        if len(self.tokenizer) > config.vocab_size:
            raise InputError(f"{folder}: the tokenizer has {len(self.tokenizer)} tokens, the "
                             f"model's vocab_size is {config.vocab_size}")
        try:
            self.token_bytes = TokenBytes(self.tokenizer)
        except ValueError as error:
            raise InputError(f"{folder}: {error}") from None
        self.template = self.tokenizer.chat_template
        if not isinstance(self.template, str):
            raise InputError(f"{folder}: no chat template, expected chat_template.jinja or one "
                             "in tokenizer_config.json")
        self._pads = {f"<|{kind}_pad|>": kind for kind in ("image", "video")}
        for pad, kind in self._pads.items():
            wanted = getattr(config, f"{kind}_token_id")
            found = self.tokenizer.backend_tokenizer.token_to_id(pad)
            if config.vision and found != wanted:
                raise InputError(f"{folder}: {kind}_token_id is {wanted}, the tokenizer's id of "
                                 f"{pad} is {found}")
        self.stop_ids = stop_ids(self.folder, self.tokenizer, config)

    @functools.cached_property
    def settings(self) -> Settings:
        """Read when the first picture needs them: text alone does without."""
        return read_settings(self.folder, self.config)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens in it recognised, none added. Raises InputError."""
        try:
            return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except (UnicodeError, TypeError):
            raise InputError("the text is not valid Unicode (it has a lone surrogate)") from None

    def text_stream(self, stops: Sequence[str] = (), opens_reasoning: bool = False) -> TextStream:
        """What turns this request's generated ids into text and reasoning."""
        return TextStream(self.token_bytes, stops, opens_reasoning)

    def render(self, messages: Sequence[Mapping], reasoning: bool | None = None,
               tools: Sequence[Mapping] | None = None, **template_kwargs: Any) -> str:
        """The prompt as text, one pad for each picture. `reasoning` sets the template's
        `enable_thinking`; None leaves it to the template. Raises InputError."""
        return self._render(*split_messages(messages), reasoning, tools, template_kwargs)

    def _render(self, messages: list[dict], slots: list[_Slot], reasoning: bool | None,
                tools: Sequence[Mapping] | None, kwargs: dict[str, Any]) -> str:
        if reasoning is not None:
            if kwargs.get("enable_thinking", reasoning) != reasoning:
                raise InputError(f"reasoning is {'on' if reasoning else 'off'}, but the template's "
                                 f"argument enable_thinking is {kwargs['enable_thinking']}")
            kwargs = {**kwargs, "enable_thinking": reasoning}
        reserved = inspect.signature(self.tokenizer.apply_chat_template).parameters
        for name in kwargs:
            if name in reserved or name == "messages":
                raise InputError(f"{name!r} cannot be set as an argument of the chat template")
        for name in [*kwargs, *(["tools"] if tools else [])]:
            if not re.search(rf"\b{re.escape(name)}\b", self.template):
                raise InputError(f"the chat template of {self.folder} knows no {name!r}")
        for i, message in enumerate(messages):
            for pad in self._pads:
                if pad in json.dumps(message, default=str):
                    raise InputError(f"messages[{i}]: contains the text {pad}, which only a "
                                     "picture may stand for")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=list(tools) if tools else None, add_generation_prompt=True,
                tokenize=False, **kwargs)
        except Exception as error:  # a template may fail in any way on messages it dislikes
            raise InputError("the chat template refused the messages: "
                             f"{' '.join(str(error).split())}") from None
        shown = [self._pads[pad] for pad in self._pad_pattern.findall(text)]
        if shown != [slot.kind for slot in slots]:
            raise InputError(
                f"the rendered prompt has {shown.count('image')} image and {shown.count('video')} "
                f"video slots, the messages have {_count(slots, 'image')} and "
                f"{_count(slots, 'video')}, or in another order")
        return text

    @functools.cached_property
    def _pad_pattern(self) -> re.Pattern:
        return re.compile("|".join(map(re.escape, self._pads)))

    def build_prompt(self, messages: Sequence[Mapping], reasoning: bool | None = None,
                     context_length: int | None = None, min_pixels: int | None = None,
                     max_pixels: int | None = None, tools: Sequence[Mapping] | None = None,
                     **template_kwargs: Any) -> Prompt:
        """Everything a prefill needs for `messages`, in the order of their contents (R30).

        `min_pixels` and `max_pixels` bound each picture whose item has no bounds of its own;
        videos keep the folder's. `context_length` (the model's maximum if None) must leave room
        for one token of an answer. Raises InputError; nothing is cut to fit (R47).
        """
        plain, slots = split_messages(messages)
        text = self._render(plain, slots, reasoning, tools, template_kwargs)
        if slots and self.config.vision is None:
            raise InputError(f"{source_name(slots[0].source)}: the target has no vision tower")
        planned = [self._plan(slot, min_pixels, max_pixels) for slot in slots]
        limit = self.config.max_position_embeddings if context_length is None else context_length
        pads = sum(plan.pads for plan in planned)
        if pads >= limit:  # known before a tokenizer works on megabytes
            raise _too_long(f"more than {pads}", pads, limit)
        pieces = iter(planned)
        ids = self.encode(self._pad_pattern.sub(lambda _: next(pieces).text, text))
        if len(ids) >= limit:
            raise _too_long(str(len(ids)), pads, limit)
        pictures = tuple(plan.read() for plan in planned)
        array = np.asarray(ids, np.int32)
        positions, delta = positions_3d(array, [p.grid for p in pictures], self.config)
        return Prompt(array, positions, delta, pictures, opens_reasoning(text))

    def _plan(self, slot: _Slot, low: int | None, high: int | None) -> _Planned:
        own = slot.min_pixels, slot.max_pixels
        if slot.kind == "video":
            return _plan_video(slot.source, with_limits(self.settings.video, *own))
        limits = (low, high) if own == (None, None) else own
        return _plan_image(slot.source, with_limits(self.settings.image, *limits))


def _plan_image(source: Source, pixels: Pixels) -> _Planned:
    try:
        _, rows, columns = image_grid(image_size(source), pixels)  # turning keeps the count
    except InputError as error:
        name = source_name(source)
        raise error if str(error).startswith(name) else InputError(f"{name}: {error}") from None
    pads = rows * columns // pixels.merge_size**2
    return _Planned("<|image_pad|>" * pads, pads, lambda: picture_of_image(source, pixels))


def _plan_video(source: Source, pixels: Pixels) -> _Planned:
    """Each temporal patch is a time stamp and a run of pads of its own. Source: HF
    `Qwen3VLProcessor.replace_video_token`; the template's own vision marks stay around all."""
    plan = plan_video(load_video(source), pixels)
    groups, rows, columns = plan.grid
    pads = rows * columns // pixels.merge_size**2
    run = f"<|vision_start|>{'<|video_pad|>' * pads}<|vision_end|>"
    text = "".join(f"<{seconds:.1f} seconds>{run}" for seconds in plan.seconds)
    return _Planned(text, groups * pads, lambda: picture_of_video(plan, pixels))


def _too_long(needed: str, pads: int, limit: int) -> InputError:
    return InputError(f"the prompt needs {needed} tokens ({pads} of pictures), at most {limit - 1} "
                      f"are allowed in a context of {limit}")


def _count(slots: list[_Slot], kind: str) -> int:
    return sum(slot.kind == kind for slot in slots)


def opens_reasoning(text: str) -> bool:
    """Whether a rendered prompt ends inside a think block of its last turn."""
    turn = text[max(text.rfind("<|im_start|>"), 0):]
    return turn.rfind(THINK) > turn.rfind(THINK_END)


def split_messages(messages: Sequence[Mapping]) -> tuple[list[dict], list[_Slot]]:
    """Messages as templates want them, and their pictures and videos in order of appearance.

    Contents are a string or a list of items of type text, image, image_url, video, video_url; a
    source is a path, a `data:` URL, bytes or a Pillow image. `detail`, `min_pixels` and
    `max_pixels` beside it bound its size. Tool arguments given as JSON text are parsed. Raises
    InputError naming the message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InputError("messages: expected a list of at least one message")
    plain: list[dict] = []
    slots: list[_Slot] = []
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"{at}: expected an object with a role")
        copy = dict(message)
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            copy["content"] = [_item(item, f"{at}.content[{j}]", slots)
                               for j, item in enumerate(content)]
        elif content is None and message.get("tool_calls"):
            copy["content"] = ""
        elif not isinstance(content, str):
            raise InputError(f"{at}: content is {type(content).__name__}, expected text or a list "
                             "of items")
        calls = message.get("tool_calls")
        if calls is not None and (isinstance(calls, str) or not isinstance(calls, Sequence)):
            raise InputError(f"{at}: tool_calls is {calls!r}, expected a list")
        if calls:
            copy["tool_calls"] = [_tool_call(call, f"{at}.tool_calls[{j}]")
                                  for j, call in enumerate(calls)]
        if "reasoning" in message:  # this project's and vLLM's name of the template's field
            copy.setdefault("reasoning_content", copy.pop("reasoning"))
        plain.append(copy)
    return plain, slots


def _item(item: Any, at: str, slots: list[_Slot]) -> dict:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "text":
        if not isinstance(item.get("text"), str):
            raise InputError(f"{at}: text is {item.get('text')!r}, expected a string")
        return dict(item)
    if not isinstance(kind, str) or kind not in VISION_ITEMS:
        raise InputError(f"{at}: type is {kind!r}, expected text, {', '.join(VISION_ITEMS)}")
    options = dict(item)
    given = [options.pop(key) for key in VISION_ITEMS[options.pop("type")] if key in options]
    source = given[0] if len(given) == 1 else None
    if kind.endswith("_url"):
        if not isinstance(source, Mapping) or not isinstance(source.get("url"), str):
            raise InputError(f"{at}: {kind} is no object with a url")
        options.update(source)
        source = options.pop("url")
    if not isinstance(source, Source):
        raise InputError(f"{at}: expected one of {', '.join(VISION_ITEMS[kind])}, with a path, a "
                         "data: URL, bytes or an image")
    detail = options.pop("detail", None)
    if detail not in (None, "auto", "high", "low"):
        raise InputError(f"{at}: detail is {detail!r}, expected auto, high or low")
    limits = [options.pop(name, None) for name in ("min_pixels", "max_pixels")]
    if options:
        raise InputError(f"{at}: unknown field {next(iter(options))!r}")
    if detail == "low" and limits[1] is None:
        limits[1] = LOW_DETAIL_PIXELS
    kind = kind.removesuffix("_url")
    slots.append(_Slot(kind, source, *limits))
    return {"type": kind}


def _tool_call(call: Any, at: str) -> dict:
    """A copy whose arguments are an object: templates iterate them, OpenAI sends JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{at}: expected an object with a function and its name")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise InputError(f"{at}: arguments are not JSON ({error})") from None
    if not isinstance(arguments, Mapping):
        raise InputError(f"{at}: arguments are {type(arguments).__name__}, expected an object")
    function = {**function, "arguments": dict(arguments)}
    return {**call, "function": function} if "function" in call else function


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer that `tokenizer.json` holds, with transformers' chat template around it.

    Not AutoTokenizer: the class named by some folders (Qwen2Tokenizer) silently replaces the
    file's split rule by its own, which tears combining marks off their letters. Raises InputError.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not (folder / "tokenizer.json").is_file():
        raise InputError(f"{folder / 'tokenizer.json'}: no such file")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses torch aloud
    from transformers import PreTrainedTokenizerFast  # here, since it takes seconds

    try:
        return PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, fix_mistral_regex=False)  # keeps the file's rule
    except Exception as error:  # its causes are many, and its messages long
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder}: the tokenizer cannot be loaded ({reason})") from None


def _ids(value: Any, where: str) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool):
            raise InputError(f"{where}: eos_token_id is {value!r}, expected ids")
    return ids


def stop_ids(folder: Path, tokenizer: Any, config: TargetConfig) -> tuple[int, ...]:
    """Ids that end an answer: those of `generation_config.json`, the tokenizer's eos,
    `<|im_end|>`, and the configuration's, which alone would miss `<|im_end|>`."""
    path = Path(folder) / "generation_config.json"
    named = _ids(read_json(path).get("eos_token_id"), str(path)) if path.is_file() else []
    turn = tokenizer.backend_tokenizer.token_to_id("<|im_end|>")
    ids = [*named, tokenizer.eos_token_id, turn, *config.eos_token_ids]
    ids = list(dict.fromkeys(i for i in ids if i is not None))
    for i in ids:
        if not 0 <= i < config.vocab_size:
            raise InputError(f"{folder}: stop id {i} is outside the vocabulary of "
                             f"{config.vocab_size}")
    return tuple(ids)


def sampling_defaults(folder: str | Path) -> dict[str, float]:
    """The sampling parameters that `generation_config.json` sets, by the names of `SAMPLING`.
    `do_sample: false` means greedy. Raises InputError on what cannot be honoured."""
    path = Path(folder) / "generation_config.json"
    fields = read_json(path)
    if fields.get("repetition_penalty") not in (None, 1):
        raise InputError(f"{path}: repetition_penalty is {fields['repetition_penalty']}, which is "
                         "not supported (presence and frequency penalties are)")
    if fields.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"{path}: {name} is {value!r}, expected a number")
    return found
