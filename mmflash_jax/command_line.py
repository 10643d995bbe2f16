"""The command line of `python -m mmflash_jax.generate`: flags, progress, output, exit codes.

In: arguments. Out: text on stdout as it streams, or with --json one JSON object; progress and the
summary on stderr. Bad input exits 2 with one line, before any weight is read. Knows no arrays.
"""

import argparse
import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from mmflash_jax.chat import Chat, sampling_defaults
from mmflash_jax.config import ConfigError, read_json
from mmflash_jax.drafters import DRAFTERS
from mmflash_jax.generate import (
    DTYPES,
    Options,
    Pair,
    Result,
    load,
    open_chat,
    prepare,
    question,
    stream_prompt,
)
from mmflash_jax.images import InputError
from ports import CheckpointError

EPILOG = """\
examples:
  a picture and a question, drafted in blocks
    python -m mmflash_jax.generate --target Qwen3.5-9B --draft Qwen3.5-9B-MMFlash \\
        --image photo.jpg --prompt "What is in this picture?"
  the target alone, sampled as its authors advise
    python -m mmflash_jax.generate --target Qwen3.5-9B --drafter none --sampling checkpoint \\
        --prompt "Tell me a story."
Pictures come first, in --image order, then the video, then the text; --messages FILE takes
OpenAI-style messages (a JSON list) for anything interleaved. The output is what the target alone
would say, with a drafter or without one.
"""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")


class _Parser(argparse.ArgumentParser):
    """Errors in one line: usage is for --help."""

    def error(self, message: str):
        self.exit(2, f"error: {' '.join(message.split())} (see --help)\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="python -m mmflash_jax.generate", epilog=EPILOG, allow_abbrev=False,
                  formatter_class=argparse.RawDescriptionHelpFormatter,
                  description="Answer a question about pictures with a Qwen3.5-family target, "
                              "drafted in blocks and verified token for token.")
    model = top.add_argument_group("models (a folder of HF safetensors or orbax, or a hub id)")
    model.add_argument("--target", required=True, metavar="DIR", help="the target")
    model.add_argument("--draft", metavar="DIR", help="its drafter")
    model.add_argument("--drafter", choices=["none", *DRAFTERS], metavar="NAME",
                       help="kind of the drafter: none (plain decoding, one token a step), "
                            f"{', '.join(DRAFTERS)} (default: mmflash)")
    model.add_argument("--dtype", choices=list(DTYPES), default="bfloat16",
                       help="of weights and activations (default: %(default)s)")
    ask = top.add_argument_group("question")
    ask.add_argument("--prompt", metavar="TEXT", help="the question")
    ask.add_argument("--image", action="append", default=[], metavar="FILE",
                     help="a picture: JPEG, PNG or WebP (repeat for more)")
    ask.add_argument("--video", metavar="FILE", help="a video file, or a folder of frames")
    ask.add_argument("--messages", metavar="FILE",
                     help="OpenAI-style messages, instead of the above")
    ask.add_argument("--min-pixels", type=int, metavar="N", help="smallest size of a picture")
    ask.add_argument("--max-pixels", type=int, metavar="N", help="largest size of a picture")
    ask.add_argument("--reasoning", choices=("on", "off"),
                     help="thinking before the answer (default: the template's own)")
    ask.add_argument("--chat-template-kwargs", metavar="JSON", default="{}",
                     help="further arguments of the chat template, a JSON object")
    say = top.add_argument_group("answer")
    say.add_argument("--max-new-tokens", type=int, default=512, metavar="N",
                     help="most tokens of the answer (default: %(default)s)")
    say.add_argument("--context-length", type=int, metavar="N",
                     help="most tokens of prompt and answer together (default: the target's)")
    say.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    say.add_argument("--top-p", type=float, metavar="P", help="nucleus filter (default: off)")
    say.add_argument("--top-k", type=int, metavar="K", help="0 is off (default)")
    say.add_argument("--min-p", type=float, metavar="P",
                     help="least probability relative to the likeliest token's (default: off)")
    say.add_argument("--presence-penalty", type=float, metavar="X", help="default: 0")
    say.add_argument("--frequency-penalty", type=float, metavar="X", help="default: 0")
    say.add_argument("--sampling", choices=("checkpoint",),
                     help="take defaults of the above from generation_config.json")
    say.add_argument("--seed", type=int, default=0, metavar="S",
                     help="of the draws at temperature > 0 (default: %(default)s)")
    say.add_argument("--stop", action="append", default=[], metavar="TEXT",
                     help="end the answer before TEXT (repeat for more)")
    say.add_argument("--ignore-eos", action="store_true", help="go on to the token limit")
    say.add_argument("--json", action="store_true", help="one JSON object on stdout, no stream")
    return top


class _Progress:
    """A bar on stderr for each thing that is loaded or compiled."""

    def __init__(self):
        self._bar, self._what = None, None

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
            loading = what.startswith("loading")
            self._bar = tqdm(total=total, desc=what, file=sys.stderr, leave=False,
                             unit="B" if loading else "program", unit_scale=loading)
            self._what = what
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._what = None, None


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    progress = _Progress()
    try:
        messages, prompt_options, options = _request(args)
        options.check()
        chat = open_chat(args.target)
        if args.sampling:
            options = _with_defaults(options, args, chat)
        prompt, limit = prepare(chat, messages, options, **prompt_options)
        bounded = args.image or args.messages and prompt.pictures  # videos have their own bounds
        if not bounded and (args.min_pixels, args.max_pixels) != (None, None):
            raise InputError("--min-pixels and --max-pixels bound pictures, but there is none")
        _keep_compiled()
        pair = load(chat, args.draft, drafter=_drafter(args), dtype=args.dtype, report=progress)
        _describe(pair)
        deltas = stream_prompt(pair, prompt, options, limit, report=progress)
        result = _print(deltas, as_json=args.json)
    except (ConfigError, CheckpointError, InputError) as error:
        progress.close()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.close()
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader went away; keep the interpreter from flushing into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    _summary(result)
    return 0


def _request(args: argparse.Namespace) -> tuple[list[dict], dict[str, Any], Options]:
    """Messages, options of the prompt, options of the answer. Raises InputError."""
    if args.draft is None and args.drafter not in (None, "none"):
        raise InputError(f"--drafter {args.drafter} needs the drafter's folder: give it with "
                         "--draft DIR")
    if args.draft is not None and args.drafter == "none":
        raise InputError("--draft names a drafter, but --drafter is none: give one of the two")
    if args.messages is None:
        if args.prompt is None:
            raise InputError("give a question with --prompt TEXT, or --messages FILE")
        if not args.prompt.strip():
            raise InputError("--prompt is empty, expected a question")
        messages = question(args.prompt, args.image, args.video)
    else:
        if args.prompt is not None or args.image or args.video is not None:
            raise InputError("--messages holds the whole question: give no --prompt, --image or "
                             "--video beside it")
        messages = read_json(Path(args.messages), list)
    try:
        kwargs = json.loads(args.chat_template_kwargs)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--chat-template-kwargs: not JSON ({error})") from None
    if not isinstance(kwargs, dict):
        raise InputError("--chat-template-kwargs: expected a JSON object")
    own = {"self", "reasoning", "chat", "messages", "options", "context_length", "min_pixels",
           "max_pixels", "tools"}
    if clash := own & {*kwargs}:
        raise InputError(f"--chat-template-kwargs: {min(clash)!r} cannot be set here")
    reasoning = None if args.reasoning is None else args.reasoning == "on"
    prompt_options = {"reasoning": reasoning, "min_pixels": args.min_pixels,
                      "max_pixels": args.max_pixels, **kwargs}
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    return messages, prompt_options, Options(
        max_new_tokens=args.max_new_tokens, seed=args.seed, ignore_eos=args.ignore_eos,
        stop=tuple(args.stop), context_length=args.context_length, **given)


def _drafter(args: argparse.Namespace) -> str:
    return "mmflash" if args.drafter in (None, "none") else args.drafter


def _with_defaults(options: Options, args: argparse.Namespace, chat: Chat) -> Options:
    """Options with the checkpoint's sampling where no flag was given."""
    found: dict[str, Any] = {name: value for name, value in sampling_defaults(chat.folder).items()
             if getattr(args, name) is None}
    return dataclasses.replace(options, **found)


def _keep_compiled() -> None:
    """Compiled programs survive the process, unless the user chose another place or none."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "mmflash_jax" / "compiled"))


def _describe(pair: Pair) -> None:
    """What was loaded, so that a wrong pair is seen at a glance (R20, R40)."""
    drafter = pair.models.drafter
    if drafter is None:
        print("target alone, plain decoding", file=sys.stderr)
        return
    c = drafter.config
    windows = ", ".join("full" if w is None else f"sliding {w}" for w in c.windows)
    print(f"drafter: block {c.block_size}, taps {list(c.target_layer_ids)} of "
          f"{c.num_target_layers} layers, mask id {c.mask_token_id}, attention {windows}",
          file=sys.stderr)


def _print(deltas: Any, as_json: bool) -> Result:
    """Stream to stdout, reasoning between think marks; or gather and print one JSON object."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack letters
        sys.stdout.reconfigure(errors="backslashreplace")
    thinking = False
    for delta in deltas:
        if not as_json:
            if delta.reasoning and not thinking:
                print("<think>", end="")
                thinking = True
            print(delta.reasoning, end="")
            if thinking and delta.text:
                print("</think>", end="")
                thinking = False
            print(delta.text, end="", flush=True)
        if delta.result is not None:
            print(json.dumps(dataclasses.asdict(delta.result)) if as_json else "", flush=True)
            return delta.result
    raise AssertionError("a stream ends with its result")


def _summary(result: Result) -> None:
    length = "-" if result.acceptance_length is None else f"{result.acceptance_length:.2f}"
    speed = result.decode_tokens_per_s
    print(f"acceptance length {length}, {'-' if speed is None else f'{speed:.1f}'} tokens/s, "
          f"{result.rounds} rounds, {result.completion_tokens} tokens ({result.finish_reason})",
          file=sys.stderr)
