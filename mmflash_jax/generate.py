"""Answer a question about a picture: `load`, `generate`, `stream`, and the command line's core.

In: checkpoint folders, OpenAI-style messages, sampling options. Out: deltas of text and reasoning
while the rounds run on the device, then a `Result`. One request at a time in one slot; many at a
time are the engine's. The command line is `python -m mmflash_jax.generate`.

    pair = load("Qwen3.5-9B", "Qwen3.5-9B-MMFlash")
    print(generate(pair, question("How many birds?", images=["birds.jpg"])).text)
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.chat import Chat
from mmflash_jax.config import check_pair, drafter_config, read_json, target_config
from mmflash_jax.drafters import drafter_class
from mmflash_jax.images import InputError
from mmflash_jax.models.target import Target, default_kernels
from mmflash_jax.models.vision import encode, vision_batches
from mmflash_jax.processor import Prompt
from mmflash_jax.round import WIDTHS, Models, admit, prefill_chunk, rounds
from mmflash_jax.sampling import seed_words
from mmflash_jax.state import State, init_state
from ports.dflash import load_drafter
from ports.qwen35 import load_target
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
    folder: Path
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
        bounds = (("max_new_tokens", 1, 2**31 - 1), ("temperature", 0, math.inf),
                  ("top_p", 0, 1), ("top_k", 0, 2**31 - 1), ("min_p", 0, 1),
                  ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2),
                  ("seed", 0, 2**64 - 1))
        for name, low, high in bounds:
            value = getattr(self, name)
            if not (low <= value <= high and math.isfinite(value)):
                raise InputError(f"{name} is {value}, expected a number from {low} to {high}")
        if self.top_p == 0:
            raise InputError("top_p is 0, expected more than 0 and at most 1")
        if any(not text for text in self.stop):
            raise InputError("stop is an empty text, which every answer contains")
        if self.context_length is not None and self.context_length < 2:
            raise InputError(f"context_length is {self.context_length}, expected 2 or more")


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


def load(target: str, draft: str | None = None, *, drafter: str = "mmflash",
         dtype: str = "bfloat16", report: Report | None = None) -> Pair:
    """Load a target, and a drafter unless `draft` is None, from folders or hub ids.

    The pair contract is checked before any weight is read (R26, R40). Raises ConfigError,
    CheckpointError, InputError or ValueError, each one line that names what is wrong.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}, expected one of {sorted(DTYPES)}")
    folder = Path(resolve(target))
    config = target_config(read_json(folder / "config.json"), str(folder / "config.json"))
    chat = Chat(folder, config)
    run = DTYPES[dtype]
    taps: tuple[int, ...] = ()
    module, params = None, {}
    if draft is not None:
        kind = drafter_class(drafter)
        draft_folder = Path(resolve(draft))
        where = draft_folder / "config.json"
        draft_config = drafter_config(read_json(where), str(where))
        check_pair(config, draft_config)
        taps = draft_config.target_layer_ids
        params["drafter"] = load_drafter(draft_folder, draft_config, dtype,
                                         progress=_loading(report, "drafter"))
        module = kind(draft_config, run, "mask_embedding" in params["drafter"])
    params["target"] = load_target(folder, config, dtype, vision=config.vision is not None,
                                   progress=_loading(report, "target"))
    model = Target(config, taps, run, default_kernels(config, run))
    return Pair(Models(model, module), params, chat, folder)


def question(text: str, images: Sequence[Any] = (), video: Any = None) -> list[dict]:
    """One user message: pictures first, in order, then the video, then the text."""
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
    options.check()
    limit = pair.models.target.config.max_position_embeddings
    if options.context_length is not None:
        if options.context_length > limit:
            raise InputError(f"context_length is {options.context_length}, but the target's "
                             f"max_position_embeddings is {limit}")
        limit = options.context_length
    prompt = pair.chat.build_prompt(messages, context_length=limit, **prompt_options)
    return stream_prompt(pair, prompt, options, limit, report)


def stream_prompt(pair: Pair, prompt: Prompt, options: Options, context_length: int,
                  report: Report | None = None) -> Iterator[Delta]:
    """As `stream`, from a prompt already built and options already checked."""
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
        new, lengths = next(answers)
        accepted += lengths
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
        models = pair.models
        self.sampled = bool(options.temperature > 0 or options.presence_penalty
                            or options.frequency_penalty)
        block = models.drafter.config.block_size if models.drafter else 1
        self.width = max(w for w in WIDTHS if w <= block)
        # A power of two, so that requests of like length share their programs.
        self.pages = 1 << (-(-(len(prompt.ids) + most) // PAGE) - 1).bit_length()
        self.chunks = _chunks(len(prompt.ids))
        self.vision = models.target.config.vision
        self.batches = list(vision_batches(prompt.pictures, self.vision)) if self.vision else []
        self._compile(report)

    def prefill(self) -> tuple[State, int]:
        """The prompt into slot 0 -> state, first token."""
        programs, params = self.pair.programs, self.pair.params
        features = self._features()
        state = admit(self._empty(), jnp.int32(0), jnp.arange(self.pages, dtype=jnp.int32),
                      self._request())
        token = jnp.int32(-1)
        for start, valid, padded in self.chunks:
            args = self._chunk(start, valid, padded, features)
            state, token = programs[self._prefill_key(padded)](params, state, *args)
        return state, int(token)

    def rounds(self, state: State) -> Iterator[tuple[list[int], list[int]]]:
        """New tokens and acceptance lengths, call by call. The next call is sent before the last
        one is read, so that the device does not wait for the host."""
        program, params = self.pair.programs[self._rounds_key()], self.pair.params
        state, emitted, done = program(params, state)
        while True:
            state, following, following_done = program(params, state)
            ran = int(done)
            ids, count, accepted = (np.asarray(x[:, 0]) for x in (
                emitted.ids, emitted.count, emitted.accepted))
            yield ([int(t) for i in range(ran) for t in ids[i, :count[i]]],
                   [int(a) for a in accepted[:ran]])
            emitted, done = following, following_done

    def _request(self) -> dict[str, Any]:
        o, stops = self.options, self.pair.chat.stop_ids
        row = np.full(self._stop_places(), -1, np.int32)
        if not o.ignore_eos:
            row[:len(stops)] = stops
        return {"rope_delta": jnp.int32(self.prompt.rope_delta), "remaining": jnp.int32(self.most),
                "stop_ids": row, "seed": np.asarray(seed_words(o.seed), np.uint32),
                "temperature": jnp.float32(o.temperature), "top_p": jnp.float32(o.top_p),
                "top_k": jnp.int32(min(o.top_k, self.pair.models.target.config.vocab_size)),
                "min_p": jnp.float32(o.min_p), "presence": jnp.float32(o.presence_penalty),
                "frequency": jnp.float32(o.frequency_penalty)}

    def _stop_places(self) -> int:
        return max(8, len(self.pair.chat.stop_ids))

    def _empty(self) -> State:
        models = self.pair.models
        drafter = models.drafter.config if models.drafter else None
        return init_state(models.target.config, drafter, slots=1, pages_per_slot=self.pages,
                          page=PAGE, dtype=models.target.dtype, stop_ids=self._stop_places())

    def _features(self) -> jax.Array | None:
        """[prompt tokens, H]: the pictures' feature rows where their pads stand."""
        if self.vision is None or not self.batches:
            return None
        models, programs = self.pair.models, self.pair.programs
        config = models.target.config

        def apply(*inputs):
            return programs["vision", inputs[0].shape](self.pair.params["target"], *inputs)

        rows = jnp.concatenate(encode(apply, self.prompt.pictures, self.vision))
        ids = self.prompt.ids
        pads = np.flatnonzero((ids == config.image_token_id) | (ids == config.video_token_id))
        return jnp.zeros((len(ids), config.hidden_size), rows.dtype).at[pads].set(rows)

    def _chunk(self, start: int, valid: int, padded: int, features: jax.Array | None):
        """Arguments of `prefill_chunk` for the prompt's tokens start .. start + valid - 1."""
        def cut(x, axis):
            pads = [(0, 0)] * x.ndim
            pads[axis] = (0, padded - valid)
            index = (slice(None),) * axis + (slice(start, start + valid),)
            return (jnp if isinstance(x, jax.Array) else np).pad(x[index], pads)

        rows = None if features is None else cut(features, 0)
        last = start + valid == len(self.prompt.ids)
        return (jnp.int32(0), cut(self.prompt.ids, 0), cut(self.prompt.positions, 1),
                jnp.int32(valid), rows, jnp.asarray(last))

    def _prefill_key(self, padded: int) -> tuple:
        return "prefill", padded, self.pages, bool(self.batches), self.sampled, self._stop_places()

    def _rounds_key(self) -> tuple:
        return "rounds", self.width, self.pages, self.sampled, self._stop_places()

    def _compile(self, report: Report | None) -> None:
        """Compile what this request needs and no earlier one did."""
        pair, models = self.pair, self.pair.models
        state = jax.eval_shape(self._empty)
        config = models.target.config
        jobs: dict[tuple, Callable[[], Any]] = {}
        see = jax.jit(lambda p, *x: models.target.apply({"params": p}, *x, method="encode"))
        for batch in self.batches:
            jobs["vision", batch.inputs[0].shape] = partial(
                see.lower, pair.params["target"], *batch.inputs)
        for padded in {padded for _, _, padded in self.chunks}:
            features = None
            if self.batches:
                features = jax.ShapeDtypeStruct((padded, config.hidden_size), models.target.dtype)
            ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (
                (), (padded,), (3, padded), ())]
            jobs[self._prefill_key(padded)] = partial(
                prefill_chunk.lower, models, pair.params, state, *ints, features,
                jax.ShapeDtypeStruct((), jnp.bool_), sampled=self.sampled)
        jobs[self._rounds_key()] = partial(
            rounds.lower, models, pair.params, state, CALL, width=self.width, pages=self.pages,
            sampled=self.sampled)
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
