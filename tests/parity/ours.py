"""This project's models on the parity cases, with the arrays named and laid out as the oracles'.

In: checkpoint folders and `Case`s. Out: numpy arrays. Reads weights through `ports`, runs the
programs that `round.py` offers, and asks the target for the output of every layer by tapping all.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax import processor
from mmflash_jax.config import DrafterConfig, drafter_config, read_json, target_config
from mmflash_jax.drafters.dflash import DFlash
from mmflash_jax.kernels.gdn_round import BORDER
from mmflash_jax.layers import rms_norm
from mmflash_jax.models.target import Target
from mmflash_jax.models.vision import encode
from mmflash_jax.round import Models, admit, prefill_chunk, rounds
from mmflash_jax.state import State, init_state
from ports.dflash import load_drafter
from ports.qwen35 import load_target
from tests.parity.cases import Case

PAGE, PAGES = 64, 6  # positions of a page, pages of a slot
PADDED = 160  # every prompt is padded to this length, so that one program serves all
CHUNK = 64
MOST_ROUNDS = 200


class Ours:
    """A target, and if asked for a drafter, in float32."""

    def __init__(self, folder: Path, drafter_folder: Path | None = None, *,
                 tap_all: bool = False):
        self.config = target_config(read_json(folder / "config.json"))
        self.params = {"target": load_target(folder, self.config, "float32")}
        self.drafter: DrafterConfig | None = None
        taps: tuple[int, ...] = ()
        if drafter_folder is not None:
            self.drafter = drafter_config(read_json(drafter_folder / "config.json"))
            self.params["drafter"] = load_drafter(drafter_folder, self.drafter, "float32")
            taps = self.drafter.target_layer_ids
        if tap_all:
            taps = tuple(range(self.config.num_hidden_layers))
        drafter = self.drafter and DFlash(self.drafter, jnp.float32)
        self.models = Models(Target(self.config, taps, jnp.float32), drafter)

    def state(self, slots: int = 1) -> State:
        return init_state(self.config, self.drafter, slots=slots, pages_per_slot=PAGES,
                          page=PAGE, dtype=jnp.float32)

    def apply(self, *args, method: str):
        """One of the target's methods, compiled. `verify` reads all pages of a slot."""
        return _apply(self.models.target, self.params["target"], *args, method=method)

    def features(self, case: Case) -> list[np.ndarray]:
        """The vision tower's rows for each picture."""
        pictures = [processor.Picture(patches, grid)
                    for patches, grid in zip(case.patches, case.grids, strict=True)]
        if self.config.vision is None:
            raise ValueError("the target has no vision tower")
        run = functools.partial(self.apply, method="encode")
        return [np.asarray(rows) for rows in encode(run, pictures, self.config.vision)]

    def positions(self, case: Case) -> tuple[np.ndarray, int]:
        return processor.positions_3d(case.ids, case.grids, self.config)

    def embeddings(self, case: Case) -> np.ndarray:
        """[T, H]: feature rows where the prompt has pads, zeros elsewhere."""
        rows = np.zeros((len(case.ids), self.config.hidden_size), np.float32)
        if case.kinds:
            c = self.config
            pads = (case.ids == c.image_token_id) | (case.ids == c.video_token_id)
            rows[pads] = np.concatenate(self.features(case))
        return rows

    def chunks(self, case: Case, size: int | None):
        """(arguments of a prefill, is it the last) for pieces of `size` tokens, or for all at
        once, padded to PADDED."""
        length = len(case.ids)
        padded = PADDED if size is None else size
        positions, _ = self.positions(case)
        rows = (case.ids[:, None], positions.T, self.embeddings(case))
        for start in range(0, length, padded):
            piece = [x[start:start + padded] for x in rows]
            valid = len(piece[0])
            ids, places, features = (np.pad(x, ((0, padded - valid), (0, 0))) for x in piece)
            yield (jnp.asarray(ids[:, 0]), jnp.asarray(places.T), jnp.int32(valid),
                   jnp.asarray(features)), start + valid == length

    def forward(self, case: Case, size: int | None = None) -> dict[str, np.ndarray]:
        """As `hf.Target.forward`; needs `tap_all`. `size`: prefill in chunks of so many tokens."""
        state, outputs = self.state(), []
        for (ids, positions, valid, features), _ in self.chunks(case, size):
            _, taps, state = self.apply(ids, positions, valid, features, jnp.int32(0), state,
                                        method="prefill")
            outputs.append(taps[:int(valid)])
            state = state.replace(slots=state.slots.replace(
                length=state.slots.length.at[0].add(valid)))
        positions, delta = self.positions(case)
        arrays = self.named(jnp.concatenate(outputs)) | self.recurrent(state, 0)
        return arrays | {"positions": positions, "rope_delta": np.asarray(delta)}

    def named(self, taps: jax.Array) -> dict[str, np.ndarray]:
        """Taps [T, L * H] of all layers as hidden [L, T, H] and logits [T, V]."""
        hidden = taps.reshape(len(taps), self.config.num_hidden_layers, -1)
        final = rms_norm(hidden[:, -1], self.params["target"]["norm"], self.config.rms_norm_eps,
                         plus_one=True)
        return {"hidden": np.asarray(hidden.transpose(1, 0, 2)),
                "logits": np.asarray(self.apply(final, method="logits"))}

    def recurrent(self, state: State, slot: int) -> dict[str, np.ndarray]:
        """State [J, dk, dv] and conv columns [C, taps - 1] of each GDN layer after the slot's
        committed tokens: the border state moved on by the tape, token by token in float64."""
        length, border = int(state.slots.length[slot]), int(state.slots.border[slot])
        arrays = {}
        for i, cache in zip(self.config.gdn_layers, state.gdn, strict=True):
            weight = self.params["target"][f"layers_{i}"]["mixer"]["conv"]
            window, beta, decay, start = (np.asarray(x, np.float64) for x in (
                cache.conv[slot], cache.beta[slot], cache.decay[slot], cache.state[slot]))
            past = weight.shape[1] - 1
            count = length - border
            assert 0 <= count < 2 * BORDER, f"the tape holds {count} tokens"
            for t in range(count):
                start = self._step(start, window[t:t + past + 1], np.asarray(weight, np.float64),
                                   beta[t], decay[t])
            arrays[f"state_{i}"] = start.transpose(0, 2, 1).astype(np.float32)
            arrays[f"conv_{i}"] = window[count:count + past].T.astype(np.float32)
        return arrays

    def _step(self, state, window, weight, beta, decay) -> np.ndarray:
        """One token of the delta rule: state [J, dv, dk], window [taps, C], weight [C, taps]."""
        c = self.config
        y = (window * weight.T).sum(0)
        y = y / (1 + np.exp(-y))
        key = y[c.key_dim:2 * c.key_dim].reshape(c.linear_num_key_heads, -1)
        key = key / np.sqrt((key**2).sum(-1, keepdims=True) + 1e-6)
        key = np.repeat(key, c.linear_num_value_heads // c.linear_num_key_heads, 0)
        value = y[2 * c.key_dim:].reshape(c.linear_num_value_heads, -1)
        state = decay[:, None, None] * state
        fresh = beta[:, None] * (value - np.einsum("jvk,jk->jv", state, key))
        return state + np.einsum("jv,jk->jvk", fresh, key)

    def admitted(self, prompts: list[Case], count: int, *, stop: int = -1, slots: int = 5
                 ) -> tuple[State, list[int]]:
        """A state with the prompts prefilled, one a slot, and the first token of each."""
        state, first = self.state(slots), []
        table = np.asarray(state.pages)
        for slot, case in enumerate(prompts):
            _, delta = self.positions(case)
            stops = np.full(state.slots.stop_ids.shape[1], -1, np.int32)
            stops[0] = stop
            state = admit(state, jnp.int32(slot), jnp.asarray(table[slot]), {
                "rope_delta": jnp.int32(delta), "remaining": jnp.int32(count),
                "stop_ids": jnp.asarray(stops)})
            for (ids, positions, valid, features), last in self.chunks(case, None):
                state, token = prefill_chunk(
                    self.models, self.params, state, jnp.int32(slot), ids, positions, valid,
                    features, jnp.asarray(last), sampled=False)
            first.append(int(token))
        return state, first

    def greedy(self, prompts: list[Case], count: int, *, width: int, stop: int = -1,
               slots: int = 5) -> list[tuple[list[int], list[int]]]:
        """For each prompt, all of them in flight together: at most `count` tokens, and the
        acceptance length of every round of its slot. Slots left over stay inactive."""
        state, first = self.admitted(prompts, count, stop=stop, slots=slots)
        _, emitted, used = rounds(self.models, self.params, state, MOST_ROUNDS, width=width,
                                  pages=PAGES, sampled=False)
        ids, counts, accepted = (np.asarray(x) for x in
                                 (emitted.ids, emitted.count, emitted.acceptance_length))
        assert not counts[:, len(prompts):].any(), "an inactive slot emitted tokens"
        results = []
        for slot, token in enumerate(first):
            kept = [ids[i, slot, :counts[i, slot]] for i in range(int(used))]
            tokens = [token, *(int(t) for row in kept for t in row)]
            results.append((tokens, [int(a) for a in accepted[:int(used), slot] if a]))
        return results


@functools.partial(jax.jit, static_argnames=("target", "method"))
def _apply(target: Target, params: dict, *args, method: str):
    if method == "verify":
        args = (*args, PAGES)
    return target.apply({"params": params}, *args, method=method)
