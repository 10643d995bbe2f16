"""Generated ids to text and reasoning, in pieces of any size.

In: token ids as they are accepted, one or a block at a time. Out: deltas whose concatenation is
byte for byte what the whole output gives at once: `Detokenizer` (R22), `StopStrings`,
`ReasoningSplitter` (R5) and, the three in a row, `TextStream`.
It knows nothing of messages, models or requests; stop ids are the caller's.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

THINK, THINK_END, TOOL_CALL = "<think>", "</think>", "<tool_call>"
MARKERS = (THINK, THINK_END, TOOL_CALL, "</tool_call>")


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary: printable bytes are
    themselves, the others the letters from U+0100 on. Source: GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in shown)
    return {**{chr(b): b for b in shown}, **{chr(256 + i): b for i, b in enumerate(hidden)}}


BYTES = _byte_letters()


class TokenBytes:
    """The bytes of each id of a byte-level tokenizer; an id without a text has none.

    Special tokens have no bytes either, except the reasoning and tool markers, which the
    parsers need whether or not the tokenizer calls them special. Raises ValueError if the
    tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer.backend_tokenizer
        decoder = type(self._tokenizer.decoder).__name__
        if decoder != "ByteLevel":
            raise ValueError(f"the tokenizer's decoder is {decoder}, expected ByteLevel")
        added = self._tokenizer.get_added_tokens_decoder()
        self._known = {i: b"" for i, token in added.items()
                       if token.special and token.content not in MARKERS}

    def __getitem__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            letters = self._tokenizer.id_to_token(token) or ""
            try:
                found = bytes(BYTES[letter] for letter in letters)
            except KeyError:  # an added token that is not spelt in byte letters
                found = letters.encode()
            self._known[token] = found
        return found


class Detokenizer:
    """Ids to text. Joined deltas equal the tokenizer's decoding of all ids at once, special
    tokens left out; U+FFFD comes only where that has it, and a cut-off tail once, at the end."""

    def __init__(self, token_bytes: TokenBytes):
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(self._bytes[int(i)] for i in ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _held(text: str, words: Iterable[str]) -> int:
    """How many last characters of `text` may be the beginning of one of `words`."""
    return max((n for word in words for n in range(1, min(len(word), len(text) + 1))
                if text.endswith(word[:n])), default=0)


class StopStrings:
    """Cuts text before the stop string that is complete first (of two, the longer one).

    Text that may turn out to belong to a stop string is held back. Raises ValueError for an
    empty stop string.
    """

    def __init__(self, stops: Sequence[str] = ()):
        if not all(stops):
            raise ValueError("a stop string is empty, expected at least one character")
        self._stops = tuple(stops)
        self._pending = ""
        self.stopped = False

    def feed(self, delta: str) -> str:
        """The text that is safe to show; "" once `stopped`."""
        if self.stopped:
            return ""
        text = self._pending + delta
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._pending = True, ""
            return text[:min(found)[1]]
        cut = len(text) - _held(text, self._stops)
        self._pending = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, once no more text can come."""
        text, self._pending = self._pending, ""
        return text


# Inside reasoning, the first of these ends it: a closing mark, or a call that the model made
# without closing (as vLLM's `qwen3` parser has it). A `<tool_call>` alone is prose. The space
# between is bounded, so that what has to be held back is.
_END = re.compile(r"</think>|<tool_call>\s{0,16}<function")
_MAYBE_CALL = re.compile(r"<tool_call>\s{0,16}(<(f(u(n(c(t(i(o)?)?)?)?)?)?)?)?\Z")


class ReasoningSplitter:
    """Text to (reasoning, text) by the rules of the `qwen3` reasoning parser.

    `opened`: the prompt ended inside a think block. A `<think>` at the very start of the output
    opens one too and is dropped; `</think>`, or a tool call, ends it. Output that is cut off
    inside is all reasoning. After the end, and where nothing was opened, all is text. Markers
    belong to neither, nothing is stripped.
    """

    def __init__(self, opened: bool):
        self._state = "start"
        self._opened = opened
        self._pending = ""

    def feed(self, delta: str) -> tuple[str, str]:
        """The (reasoning, text) that this piece settles."""
        text = self._pending + delta
        self._pending = ""
        if self._state == "start":
            if THINK.startswith(text) and text != THINK:
                self._pending = text
                return "", ""
            starts = text.startswith(THINK)
            text = text[len(THINK):] if starts else text
            self._state = "reasoning" if starts or self._opened else "text"
        if self._state == "text":
            return "", text
        if end := _END.search(text):
            self._state = "text"
            rest = end.end() if end[0] == THINK_END else end.start()
            return text[:end.start()], text[rest:]
        cut = len(text) - _held(text, (THINK_END, TOOL_CALL))
        if call := _MAYBE_CALL.search(text):
            cut = min(cut, call.start())
        self._pending = text[cut:]
        return text[:cut], ""

    def finish(self) -> tuple[str, str]:
        """What was held back, once no more text can come."""
        text, self._pending = self._pending, ""
        if self._state == "reasoning" or (self._state == "start" and self._opened):
            return text, ""
        return "", text


def split_reasoning(text: str, opened: bool) -> tuple[str | None, str]:
    """(reasoning, text) of a whole output; reasoning is None when there is none."""
    splitter = ReasoningSplitter(opened)
    first, last = splitter.feed(text), splitter.finish()
    return (first[0] + last[0]) or None, first[1] + last[1]


class TextStream:
    """Ids to (reasoning, text) deltas with stop strings, for one request.

    `used` counts the ids taken; once `stopped` by a stop string no further id is, so that
    neither text nor count depends on how ids were grouped. Stop ids are not to be fed.
    """

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = (),
                 opens_reasoning: bool = False):
        self._detokenizer = Detokenizer(token_bytes)
        self._stops = StopStrings(stops)
        self._splitter = ReasoningSplitter(opens_reasoning)
        self.used = 0

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def feed(self, ids: Iterable[int]) -> tuple[str, str]:
        shown = []
        for token in ids:
            if self.stopped:
                break
            self.used += 1
            shown.append(self._stops.feed(self._detokenizer.feed((token,))))
        return self._splitter.feed("".join(shown))

    def finish(self) -> tuple[str, str]:
        """The last deltas: cut-off characters and everything held back."""
        shown = self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        first, last = self._splitter.feed(shown), self._splitter.finish()
        return first[0] + last[0], first[1] + last[1]
