"""Answer a question about a picture: `load`, `generate`, `stream`, and the command line's core.

In: checkpoint folders, OpenAI-style messages, sampling options. Out: deltas of text and reasoning
while the rounds run on the device, then a `Result`. One request at a time in one slot; many at a
time are the engine's. The command line is `python -m mmflash_jax.generate`. The file is
long because a request's whole way, from options to result, is read in one place.

    pair = load("Qwen3.5-9B", "Qwen3.5-9B-MMFlash")
    print(generate(pair, question("How many birds?", images=["birds.jpg"])).text)
"""

import dataclasses
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.chat import Chat
from mmflash_jax.config import ConfigError, check_pair, drafter_config, read_json, target_config
from mmflash_jax.drafters import drafter_class
from mmflash_jax.images import InputError
from mmflash_jax.models.target import Target, default_kernels
from mmflash_jax.models.vision import vision_batches
from mmflash_jax.processor import Prompt
from mmflash_jax.round import WIDTHS, Models, admit, prefill_chunk, rounds
from mmflash_jax.sampling import seed_words
from mmflash_jax.state import State, init_state
from ports.dflash import load_drafter
from ports.orbax_dir import is_orbax
from ports.qwen35 import load_target, open_target
from ports.safetensors_dir import resolve

PAGE = 256  # positions of a K/V page
CHUNKS = (64, 256, 1024, 2048)  # padded lengths of a prefill chunk
CALL = 8  # rounds in one program; text streams after each
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}

Report = Callable[[str, int, int], None]  # (what, done, total)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and perhaps its drafter, on the device, with the text side of the target's folder.
    `programs` keeps what was compiled, by shape."""

    models: Models
    params: dict
    chat: Chat
    programs: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Options:
    """How to answer. Greedy unless `temperature` > 0; every filter off unless given."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    context_length: int | None = None  # the target's maximum if None

    def check(self) -> None:
        """Raise InputError naming the first option that cannot be run."""
        whole: Any = numbers.Integral
        real: Any = numbers.Real
        bounds = (("max_new_tokens", whole, 1, 2**31 - 1), ("temperature", real, 0, 1000),
                  ("top_p", real, 0, 1), ("top_k", whole, 0, 2**31 - 1), ("min_p", real, 0, 1),
                  ("presence_penalty", real, -2, 2), ("frequency_penalty", real, -2, 2),
                  ("seed", whole, 0, 2**64 - 1))
        for name, kind, low, high in bounds:
            value = getattr(self, name)
            if not isinstance(value, kind) or not low <= value <= high:  # NaN is no such number
                raise InputError(f"{name} is {value!r}, expected a {'whole ' * (kind is whole)}"
                                 f"number from {low} to {high}")
        if self.top_p == 0:
            raise InputError("top_p is 0, expected more than 0 and at most 1")
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise InputError(f"stop is {self.stop!r}, expected several texts")
        if not all(self.stop):
            raise InputError("stop is an empty text, which every answer contains")
        length = self.context_length
        if length is not None and (not isinstance(length, whole) or length < 2):
            raise InputError(f"context_length is {length!r}, expected a whole number from 2")


@dataclasses.dataclass(frozen=True)
class Result:
    """A whole answer. `token_ids` and `completion_tokens` include the stop id, `text` does not;
    neither text nor reasoning is stripped. Rounds exclude the first token, which prefill gives."""

    text: str
    reasoning: str | None
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str  # "stop" or "length"
    rounds: int
    acceptance_length: float | None  # mean of acceptance_lengths; None without a round
    acceptance_lengths: list[int]  # accepted drafts + 1, one a round
    prefill_s: float
    decode_s: float
    decode_tokens_per_s: float | None


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of the answer as it streams; the last one carries the `result`."""

    text: str
    reasoning: str
    result: Result | None = None


def open_chat(target: str | Path) -> Chat:
    """The text side of a target's folder or hub id: all that a prompt needs, and no weights.
    Raises ConfigError, CheckpointError or InputError."""
    folder = Path(resolve(target))
    where = folder / "config.json"
    return Chat(folder, target_config(read_json(where), str(where)))


def load(target: str | Path | Chat, draft: str | Path | None = None, *, drafter: str = "mmflash",
         dtype: str = "bfloat16", report: Report | None = None) -> Pair:
    """Load a target, and a drafter unless `draft` is None, from folders or hub ids; `target` may
    also be the result of `open_chat`.

    The pair contract is checked before any weight is read (R26, R40). Raises ConfigError,
    CheckpointError, InputError or ValueError, each one line that names what is wrong.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}, expected one of {sorted(DTYPES)}")
    kind = drafter_class(drafter)
    chat = target if isinstance(target, Chat) else open_chat(target)
    folder, config, run = chat.folder, chat.config, DTYPES[dtype]
    if not is_orbax(folder):  # before the drafter is read; load_target would say it after
        open_target(folder, config)
    taps: tuple[int, ...] = ()
    module, params = None, {}
    if draft is not None:
        draft_folder = Path(resolve(draft))
        where = draft_folder / "config.json"
        draft_config = drafter_config(read_json(where), str(where))
        check_pair(config, draft_config)
        if draft_config.block_size < WIDTHS[1]:
            raise ConfigError(f"{where}: block_size is {draft_config.block_size}, expected at "
                              f"least {WIDTHS[1]}")
        taps = draft_config.target_layer_ids
        params["drafter"] = load_drafter(draft_folder, draft_config, dtype,
                                         progress=_loading(report, "drafter"))
        module = kind(draft_config, run, "mask_embedding" in params["drafter"])
    params["target"] = load_target(folder, config, dtype, vision=config.vision is not None,
                                   progress=_loading(report, "target"))
    model = Target(config, taps, run, default_kernels(config, run))
    return Pair(Models(model, module), params, chat)


def question(text: str, images: Sequence[Any] = (), video: Any = None) -> list[dict]:
    """One user message: pictures first, in order, then the video, then the text."""
    if isinstance(images, str | bytes):
        raise InputError(f"images is {images[:60]!r}, expected a list of pictures")
    items: list[dict] = [{"type": "image", "image": image} for image in images]
    items += [] if video is None else [{"type": "video", "video": video}]
    return [{"role": "user", "content": [*items, {"type": "text", "text": text}]}]


def generate(pair: Pair, messages: Sequence[Mapping], options: Options | None = None,
             **prompt_options: Any) -> Result:
    """The whole answer to `messages`; arguments as in `stream`."""
    for delta in stream(pair, messages, options, **prompt_options):
        if delta.result is not None:
            return delta.result
    raise AssertionError("a stream ends with its result")


def stream(pair: Pair, messages: Sequence[Mapping], options: Options | None = None, *,
           report: Report | None = None, **prompt_options: Any) -> Iterator[Delta]:
    """Deltas of the answer to `messages`, the last with the `Result`.

    `prompt_options` go to `Chat.build_prompt`: reasoning, min_pixels, max_pixels, tools and
    arguments of the chat template. Raises InputError before any work.
    """
    options = options or Options()
    prompt, limit = prepare(pair.chat, messages, options, **prompt_options)
    return stream_prompt(pair, prompt, options, limit, report)


def prepare(chat: Chat, messages: Sequence[Mapping], options: Options, **prompt_options: Any
            ) -> tuple[Prompt, int]:
    """The prompt and its context limit, all input checked. Needs no weights; raises InputError."""
    options.check()
    reasoning = prompt_options.get("reasoning")
    if reasoning not in (None, True, False):
        raise InputError(f"reasoning is {reasoning!r}, expected True, False or None")
    limit = chat.config.max_position_embeddings
    if options.context_length is not None:
        if options.context_length > limit:
            raise InputError(f"context_length is {options.context_length}, but the target's "
                             f"max_position_embeddings is {limit}")
        limit = int(options.context_length)
    return chat.build_prompt(messages, context_length=limit, **prompt_options), limit


def stream_prompt(pair: Pair, prompt: Prompt, options: Options, context_length: int,
                  report: Report | None = None) -> Iterator[Delta]:
    """As `stream`, from what `prepare` returned."""
    most = min(options.max_new_tokens, context_length - len(prompt.ids))
    run = _Run(pair, prompt, options, most, report)
    text = pair.chat.text_stream(options.stop, prompt.opens_reasoning)
    stops = set() if options.ignore_eos else set(pair.chat.stop_ids)
    ids: list[int] = []
    accepted: list[int] = []
    whole = ["", ""]  # reasoning, text

    begun = time.perf_counter()
    state, first = run.prefill()
    new = [first]
    prefill_s = time.perf_counter() - begun
    begun = time.perf_counter()
    answers = run.rounds(state)
    while True:
        ids += new
        stopped = ids[-1] in stops
        reasoning, said = text.feed(new[:-1] if stopped else new)
        if stopped or text.stopped or len(ids) == most:
            break
        if reasoning or said:
            whole = [whole[0] + reasoning, whole[1] + said]
            yield Delta(said, reasoning)
        new, length = next(answers)
        accepted.append(length)
    decode_s = time.perf_counter() - begun
    if text.stopped:  # what a round gave beyond a stop text is not part of the answer
        ids = ids[:text.used]
    last = text.finish()
    reasoning, said = reasoning + last[0], said + last[1]
    whole = [whole[0] + reasoning, whole[1] + said]
    yield Delta(said, reasoning, Result(
        text=whole[1], reasoning=whole[0] or None, token_ids=ids, prompt_tokens=len(prompt.ids),
        completion_tokens=len(ids), finish_reason="stop" if stopped or text.stopped else "length",
        rounds=len(accepted), acceptance_lengths=accepted,
        acceptance_length=sum(accepted) / len(accepted) if accepted else None,
        prefill_s=prefill_s, decode_s=decode_s,
        decode_tokens_per_s=(len(ids) - 1) / decode_s if len(ids) > 1 else None))


class _Run:
    """One request on the device: its programs (compiled here, before the clock starts), its
    prefill, its rounds."""

    def __init__(self, pair: Pair, prompt: Prompt, options: Options, most: int,
                 report: Report | None):
        self.pair, self.prompt, self.options, self.most = pair, prompt, options, most
        models, config = pair.models, pair.models.target.config
        self.sampled = bool(options.temperature > 0 or options.presence_penalty
                            or options.frequency_penalty)
        block = models.drafter.config.block_size if models.drafter else 1
        self.width = max(w for w in WIDTHS if w <= block)
        # A power of two, so that requests of like length share their programs.
        self.pages = 1 << (-(-(len(prompt.ids) + most) // PAGE) - 1).bit_length()
        self.chunks = _chunks(len(prompt.ids))
        self.stop_places = max(8, len(pair.chat.stop_ids))
        self.batches = list(vision_batches(prompt.pictures, config.vision)) if config.vision else []
        self.places = self._places()
        self._compile(report)

    def prefill(self) -> tuple[State, int]:
        """The prompt into slot 0 -> state, first token."""
        programs, params = self.pair.programs, self.pair.params
        rows = tuple(programs["vision", batch.inputs[0].shape](params["target"], *batch.inputs)
                     for batch in self.batches)
        state = programs[self._start_key()](self._request())
        token = np.int32(-1)
        for start, valid, padded in self.chunks:
            features = None
            if rows:
                features = programs[self._place_key(padded)](
                    rows, self._places_in(start, valid, padded))
            last = start + valid == len(self.prompt.ids)
            state, token = programs[self._prefill_key(padded)](
                params, state, np.int32(0), self._cut(self.prompt.ids, start, valid, padded),
                self._cut(self.prompt.positions, start, valid, padded), np.int32(valid), features,
                np.bool_(last))
        return state, int(token)

    def rounds(self, state: State) -> Iterator[tuple[list[int], int]]:
        """New tokens and acceptance length, round by round. The next call is sent before the last
        one is read, so that the device does not wait for the host."""
        program, params = self.pair.programs[self._rounds_key()], self.pair.params
        state, emitted, done = program(params, state)
        while True:
            state, following, following_done = program(params, state)
            ids, count, accepted = (np.asarray(x)[:, 0] for x in (
                emitted.ids, emitted.count, emitted.acceptance_length))
            for i in range(int(done)):
                yield [int(t) for t in ids[i, :count[i]]], int(accepted[i])
            emitted, done = following, following_done

    def _request(self) -> dict[str, Any]:
        """The fields of `Slots` that `admit` sets, as numpy scalars and arrays."""
        o, stops = self.options, self.pair.chat.stop_ids
        row = np.full(self.stop_places, -1, np.int32)
        if not o.ignore_eos:
            row[:len(stops)] = stops
        return {"rope_delta": np.int32(self.prompt.rope_delta), "remaining": np.int32(self.most),
                "stop_ids": row, "seed": np.asarray(seed_words(int(o.seed)), np.uint32),
                "temperature": np.float32(o.temperature), "top_p": np.float32(o.top_p),
                "top_k": np.int32(min(o.top_k, self.pair.models.target.config.vocab_size)),
                "min_p": np.float32(o.min_p), "presence": np.float32(o.presence_penalty),
                "frequency": np.float32(o.frequency_penalty)}

    def _empty(self) -> State:
        models = self.pair.models
        drafter = models.drafter.config if models.drafter else None
        return init_state(models.target.config, drafter, slots=1, pages_per_slot=self.pages,
                          page=PAGE, dtype=models.target.dtype, stop_ids=self.stop_places)

    def _start(self, request: dict[str, Any]) -> State:
        pages = jnp.arange(self.pages, dtype=jnp.int32)
        return admit(self._empty(), jnp.int32(0), pages, request)

    def _places(self) -> list[np.ndarray]:
        """For each vision batch, i32 [frames, rows of a frame]: the place in the prompt of each
        feature row, -1 for padding."""
        config, ids = self.pair.models.target.config, self.prompt.ids
        pads = np.flatnonzero((ids == config.image_token_id) | (ids == config.video_token_id))
        unit = config.vision.spatial_merge_size**2 if config.vision else 1
        places, used = [], 0
        for batch in self.batches:
            frames, patches = batch.inputs[0].shape[:2]
            place = np.full((frames, patches // unit), -1, np.int32)
            count = batch.frames * batch.rows
            place[:batch.frames, :batch.rows] = pads[used:used + count].reshape(batch.frames, -1)
            places.append(place)
            used += count
        return places

    def _places_in(self, start: int, valid: int, padded: int) -> tuple[np.ndarray, ...]:
        """`places` counted from `start` of a chunk; `padded`, past its end, for rows outside it."""
        return tuple(np.where((p >= start) & (p < start + valid), p - start, padded)
                     for p in self.places)

    def _place(self, padded: int, rows: tuple[jax.Array, ...], places: tuple[jax.Array, ...]
               ) -> jax.Array:
        """[padded, H]: feature rows [frames, rows, H] at their places in a chunk, zeros between."""
        features = jnp.zeros((padded, rows[0].shape[-1]), rows[0].dtype)
        for some, place in zip(rows, places, strict=True):
            features = features.at[place].set(some, mode="drop")
        return features

    @staticmethod
    def _cut(x: np.ndarray, start: int, valid: int, padded: int) -> np.ndarray:
        """`valid` entries of the last axis of x from `start`, padded with zeros."""
        return np.pad(x[..., start:start + valid], [(0, 0)] * (x.ndim - 1) + [(0, padded - valid)])

    def _start_key(self) -> tuple:
        return "start", self.pages, self.stop_places

    def _place_key(self, padded: int) -> tuple:
        return "place", padded, *(place.shape for place in self.places)

    def _prefill_key(self, padded: int) -> tuple:
        return "prefill", padded, self.pages, bool(self.batches), self.sampled, self.stop_places

    def _rounds_key(self) -> tuple:
        return "rounds", self.width, self.pages, self.sampled, self.stop_places

    def _compile(self, report: Report | None) -> None:
        """Compile what this request needs and no earlier one did."""
        pair, models = self.pair, self.pair.models
        state = jax.eval_shape(self._empty)
        hidden, dtype = models.target.config.hidden_size, models.target.dtype
        jobs: dict[tuple, Callable[[], Any]] = {
            self._start_key(): partial(jax.jit(self._start).lower, self._request())}
        see = jax.jit(lambda p, *x: models.target.apply({"params": p}, *x, method="encode"))
        for batch in self.batches:
            jobs["vision", batch.inputs[0].shape] = partial(
                see.lower, pair.params["target"], *batch.inputs)
        rows = tuple(jax.ShapeDtypeStruct((*p.shape, hidden), dtype) for p in self.places)
        for padded in {padded for _, _, padded in self.chunks}:
            features = None
            if rows:
                features = jax.ShapeDtypeStruct((padded, hidden), dtype)
                jobs[self._place_key(padded)] = partial(
                    jax.jit(partial(self._place, padded)).lower, rows, tuple(self.places))
            ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (
                (), (padded,), (3, padded), ())]
            jobs[self._prefill_key(padded)] = partial(
                prefill_chunk.lower, models, pair.params, state, *ints, features,
                jax.ShapeDtypeStruct((), jnp.bool_), sampled=self.sampled)
        if self.most > 1:  # prefill gives the first token
            jobs[self._rounds_key()] = partial(
                rounds.lower, models, pair.params, state, CALL, width=self.width,
                pages=self.pages, sampled=self.sampled)
        missing = {key: job for key, job in jobs.items() if key not in pair.programs}
        for done, (key, job) in enumerate(missing.items()):
            if report is not None:
                report("compiling", done, len(missing))
            pair.programs[key] = job().compile()
        if report is not None and missing:
            report("compiling", len(missing), len(missing))


def _chunks(tokens: int) -> list[tuple[int, int, int]]:
    """(start, tokens, padded length) of the chunks of a prompt."""
    most = CHUNKS[-1]
    cuts = [(start, most, most) for start in range(0, tokens - most, most)]
    start = len(cuts) * most
    left = tokens - start
    return [*cuts, (start, left, min(size for size in CHUNKS if size >= left))]


def _loading(report: Report | None, what: str) -> Callable[[int, int], None] | None:
    if report is None:
        return None
    return lambda done, total: report(f"loading {what}", done, total)


if __name__ == "__main__":
    from mmflash_jax.command_line import main

    raise SystemExit(main())
