"""Requests served by the programs of `round.py` over a few slots, with the mock drafter.

In: a tiny target's folder, requests as token ids. Out: the ids of each answer, why it ended and
the acceptance length of its rounds. Float32, pages of 16 and eight to a slot unless asked for
otherwise, four rounds a call.
"""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.models.target import Target
from mmflash_jax.round import Models, admit, prefill_chunk, rounds
from mmflash_jax.sampling import seed_words
from mmflash_jax.state import RUNNING, State, init_state
from tests.mock_drafter import MockDrafter, mock_config, mock_params
from tests.parity.ours import Ours

PAGE, PAGES = 16, 8
LIMIT = PAGE * PAGES  # positions of a slot
CHUNK = 64
ROUNDS = 4  # in one program
START = 21  # tokens of the prompt whose text is grouped in many ways
TAPS = (0, 2)
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "presence": 0.0, "frequency": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "presence": 0.4, "frequency": 0.2}


@dataclasses.dataclass
class Request:
    prompt: np.ndarray
    most: int
    seed: int = 0
    stop: int = -1
    options: dict = dataclasses.field(default_factory=lambda: GREEDY)


@dataclasses.dataclass
class Answer:
    ids: list[int]
    finish: int
    accepted: list[int]


@partial(jax.jit, static_argnames=("target", "pages"))
def look(target: Target, params: dict, state: State, pages: int) -> tuple[jax.Array, State]:
    """The next logits [R, V], all slots active (others write no keys, so they cannot look)."""
    slots = state.slots
    state = state.replace(slots=slots.replace(active=jnp.ones_like(slots.active)))
    hidden, _, state = target.apply({"params": params}, slots.anchor[:, None], state, pages,
                                    method="verify")
    return target.apply({"params": params}, hidden, method="logits")[:, 0], state


def same_bits(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


class Lab:
    """A target, the mock drafter, and a server of requests over a few slots."""

    def __init__(self, folder: Path, vocab: int | None = None, *, page: int = PAGE,
                 pages: int = PAGES):
        """`vocab`: only the first so many tokens exist. `page`, `pages`: positions of a page and
        pages of a slot. `order`, if a test sets it, gives the pages of the pool to the slots."""
        self.ours = Ours(folder)
        self.page, self.pages, self.limit = page, pages, page * pages
        self.order: np.ndarray | None = None
        self.config, self.target = self.ours.config, dict(self.ours.params["target"])
        if vocab is not None:
            self.config = dataclasses.replace(self.config, vocab_size=vocab)
            self.target |= {name: self.target[name][:vocab] for name in ("embed", "head")}
        self.drafter = mock_config(self.config, TAPS)
        self.models = Models(Target(self.config, TAPS, jnp.float32), MockDrafter(self.drafter))

    def empty(self, slots: int) -> tuple[State, dict]:
        state = init_state(self.config, self.drafter, slots=slots, pages_per_slot=self.pages,
                           page=self.page, dtype=jnp.float32, stop_ids=2)
        return state, {"target": self.target, "drafter": mock_params(slots, self.limit)}

    def admit(self, params: dict, state: State, slot: int, request: Request, *, bucket: int = CHUNK,
              positions: np.ndarray | None = None, delta: int = 0, sampled: bool = True
              ) -> tuple[State, int]:
        """The request's prompt into a slot, in chunks of `bucket` -> state, first token."""
        table = np.arange(self.pages, dtype=np.int32) + slot * self.pages
        if self.order is not None:
            table = self.order[table]
        state = admit(state, np.int32(slot), table, {
            "rope_delta": np.int32(delta), "remaining": np.int32(request.most),
            "stop_ids": np.array([-1, request.stop], np.int32), "min_p": np.float32(0),
            "seed": np.array(seed_words(request.seed), np.uint32),
            **{name: np.asarray(value, np.int32 if name == "top_k" else np.float32)
               for name, value in request.options.items()}})
        length = len(request.prompt)
        if positions is None:
            positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length))
        token = jnp.int32(-1)
        for start in range(0, length, bucket):
            assert int(token) == -1, "a token before the last chunk"
            ids, places = request.prompt[start:start + bucket], positions[:, start:start + bucket]
            valid = len(ids)
            # What stands in the padding must not matter (R1).
            ids = np.pad(ids, (0, bucket - valid), constant_values=7).astype(np.int32)
            places = np.pad(places, ((0, 0), (0, bucket - valid)), constant_values=3)
            state, token = prefill_chunk(
                self.models, params, state, np.int32(slot), ids, places.astype(np.int32),
                np.int32(valid), None, np.bool_(start + valid == length), sampled=sampled)
        return state, int(token)

    def step(self, params: dict, state: State, width: int, sampled: bool = True):
        """Up to ROUNDS rounds -> state, new ids of each slot, acceptance lengths of each slot."""
        state, emitted, used = rounds(self.models, params, state, ROUNDS, width=width,
                                      pages=self.pages, sampled=sampled)
        ids, count, accepted = (np.asarray(x) for x in (
            emitted.ids, emitted.count, emitted.acceptance_length))
        assert not count[int(used):].any()
        slots = range(ids.shape[1])
        new = [[int(t) for i in range(ROUNDS) for t in ids[i, r, :count[i, r]]] for r in slots]
        return state, new, [[int(a) for a in accepted[:, r] if a] for r in slots]

    def serve(self, requests: list[Request], *, slots: int, width: int, truth=None, right=None,
              sampled: bool = True, bucket: int = CHUNK, unused: int | None = None
              ) -> list[Answer]:
        """Answer all requests, one admitted every few rounds as slots become free. `truth`: the
        answer of each, for the drafter; `right`: how often it is right, a number or an array
        [limit] for each request; `unused`: a slot that gets none."""
        state, params = self.empty(slots)
        answers: list[Answer] = [Answer([], RUNNING, []) for _ in requests]
        holds: list[int | None] = [None] * slots
        waiting = list(range(len(requests)))
        while waiting or any(h is not None for h in holds):
            free = [slot for slot, held in enumerate(holds) if held is None and slot != unused]
            if waiting and free:
                slot, which = free[0], waiting.pop(0)
                holds[slot] = which
                if truth is not None:
                    text = np.concatenate([requests[which].prompt, truth[which]])
                    params["drafter"] = {k: v.copy() for k, v in params["drafter"].items()}
                    params["drafter"]["truth"][slot] = np.pad(
                        text, (0, self.limit - len(text)))
                    params["drafter"]["right"][slot] = right[which]
                state, first = self.admit(params, state, slot, requests[which], bucket=bucket,
                                          sampled=sampled)
                answers[which].ids.append(first)
            state, new, accepted = self.step(params, state, width, sampled)
            finish = np.asarray(state.slots.finish)
            active = np.asarray(state.slots.active)
            for slot, held in enumerate(holds):
                if held is None:
                    assert not new[slot], "a free slot emitted tokens"
                    continue
                answers[held].ids += new[slot]
                answers[held].accepted += accepted[slot]
                if not active[slot]:
                    answers[held].finish, holds[slot] = int(finish[slot]), None
        return answers

    def alone(self, requests: list[Request], **options) -> list[Answer]:
        """Plain decoding, each request in a state of its own with one slot."""
        return [self.serve([request], slots=1, width=1, **options)[0] for request in requests]

    def rows(self, state: State, slot: int, length: int) -> list[np.ndarray]:
        """Keys and values of the committed positions, [length, K, D] each, drafter context last."""
        found = []
        for cache in (*state.attention, *state.context):
            for pool in (cache.keys, cache.values):
                mine = np.asarray(pool)[np.asarray(state.pages)[slot]]  # [n, K, S, D]
                mine = mine.transpose(0, 2, 1, 3)
                found.append(mine.reshape(self.limit, *mine.shape[2:])[:length])
        return found

    def committed(self, state: State, slot: int) -> list[np.ndarray]:
        """Every number of `state` that is history of the slot, as stored."""
        length, border = int(state.slots.length[slot]), int(state.slots.border[slot])
        tape = length - border
        past = self.config.linear_conv_kernel_dim - 1
        return self.rows(state, slot, length) + [np.asarray(x) for c in state.gdn for x in (
            c.state[slot], c.conv[slot, :past + tape], c.beta[slot, :tape], c.decay[slot, :tape])]

    def bits(self, state: State, slot: int) -> list[np.ndarray]:
        """Next logits and all committed numbers of a slot, its states moved to the newest
        border."""
        logits, state = look(self.models.target, self.target, state, self.pages)
        return [np.asarray(logits[slot]), *self.committed(state, slot)]

    def reach(self, text: np.ndarray, count: int, widths, right, *, slots: int = 1, slot: int = 0
              ) -> State:
        """Commit `count` tokens after the first START of `text`, one program call for each of
        `widths` in turn, the drafter right as `right` says; other slots hold other texts."""
        state, params = self.empty(slots)
        params["drafter"]["truth"][slot, :len(text)] = text
        params["drafter"]["right"][slot] = right
        for other in range(slots):
            if other == slot:
                state, _ = self.admit(params, state, slot, Request(text[:START], count + 1))
            elif other % 3 != 1:  # some stay inactive
                state, _ = self.admit(params, state, other, Request(self.prompt(5 + 7 * other), 90))
        turn = 0
        while bool(state.slots.active[slot]):
            state, _, _ = self.step(params, state, widths[turn % len(widths)])
            turn += 1
        assert int(state.slots.length[slot]) == START + count
        return state

    def same_state(self, got: State, slot: int, want: State, length: int, other: int = 0) -> None:
        """Slot of `got` equals slot `other` of `want` in all that is committed, to 1e-4."""
        for state, r in ((got, slot), (want, other)):
            assert int(state.slots.length[r]) == length
            index = self.rows(state, r, length)[-1][:, 0, 0]
            np.testing.assert_array_equal(index, np.arange(length))
        mine, fresh = self.ours.recurrent(got, slot), self.ours.recurrent(want, other)
        for name in fresh:
            np.testing.assert_allclose(mine[name], fresh[name], atol=1e-4, rtol=1e-4,
                                       err_msg=name)
        for a, b in zip(self.rows(got, slot, length), self.rows(want, other, length),
                        strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)

    def prompt(self, length: int, seed: int = 0) -> np.ndarray:
        return np.random.RandomState(100 * length + seed).randint(0, 256, length).astype(np.int32)
