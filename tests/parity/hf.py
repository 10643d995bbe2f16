"""The target's oracle: HF transformers' Qwen3.5 in float32 on the CPU, with eager attention.

In: a checkpoint folder and `Case`s. Out: numpy arrays. Needs torch. Every call starts from nothing:
the rotary offset that the HF model keeps between calls is cleared, and speculative loops use whole
prefills, since cutting back HF's cache leaves the recurrent state as it was.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3_5ForConditionalGeneration

from tests.parity.cases import Case

torch.set_num_threads(1)  # tiny products: more threads only wait for each other


class Target:
    """A checkpoint loaded by HF. Raises AssertionError if any tensor is missing or surplus."""

    def __init__(self, folder: Path):
        self.model, report = Qwen3_5ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        faults = {kind: names for kind, names in report.items() if names}
        assert not faults, f"{folder}: HF loads it with faults: {faults}"
        self.model.eval()
        self.layers = self.model.model.language_model.layers

    @torch.no_grad()
    def forward(self, case: Case) -> dict[str, np.ndarray]:
        """One pass over the prompt. Returns logits [T, V], hidden [L, T, H] (the output of each
        decoder layer), final [T, H] (normed), positions [3, T], rope_delta [], and for each GDN
        layer i state_i [J, dk, dv] and conv_i [C, taps - 1] (oldest column first)."""
        outputs: list[torch.Tensor] = []
        hooks = [layer.register_forward_hook(lambda _m, _i, out: outputs.append(out))
                 for layer in self.layers]
        try:
            inputs = self._inputs(case)
            result = self.model(**inputs, use_cache=True, output_hidden_states=True)
        finally:
            for hook in hooks:
                hook.remove()
        positions, delta = self.positions(case)
        out = {"logits": result.logits[0], "final": result.hidden_states[-1][0],
               "hidden": torch.stack([o[0] for o in outputs])}
        arrays = {name: value.numpy() for name, value in out.items()}
        arrays |= {"positions": positions, "rope_delta": np.asarray(delta)}
        for i, layer in enumerate(self.layers):
            if hasattr(layer, "linear_attn"):
                cache = result.past_key_values.layers[i]
                arrays[f"state_{i}"] = cache.recurrent_states[0][0].numpy().copy()
                arrays[f"conv_{i}"] = cache.conv_states[0][0, :, 1:].numpy().copy()
        return arrays

    @torch.no_grad()
    def positions(self, case: Case) -> tuple[np.ndarray, int]:
        """Rotary positions [3, T] of the prompt's tokens and the offset of those after it."""
        inputs = self._inputs(case)
        positions, delta = self.model.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"))
        return positions[:, 0].numpy(), int(delta)

    @torch.no_grad()
    def features(self, case: Case) -> list[np.ndarray]:
        """The vision tower's output [t*h*w / 4, H] for each image and video, in order."""
        return [self.model.model.get_image_features(torch.from_numpy(patches),
                                                    torch.tensor([grid])).pooler_output[0].numpy()
                for patches, grid in zip(case.patches, case.grids, strict=True)]

    @torch.no_grad()
    def greedy(self, case: Case, count: int) -> tuple[np.ndarray, float]:
        """`count` greedy tokens after the prompt, one token a step, stop ids ignored; and the
        smallest difference between the two highest logits on the way."""
        cache, tokens, gap = None, [], np.inf
        inputs = self._inputs(case)
        for _ in range(count):
            result = self.model(**inputs, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            best = torch.topk(result.logits[0, -1], 2)
            tokens.append(int(best.indices[0]))
            gap = min(gap, float(best.values[0] - best.values[1]))
            inputs = {"input_ids": best.indices[None, :1]}
        return np.asarray(tokens, np.int32), gap

    @torch.no_grad()
    def rows(self, ids: np.ndarray, first: int, taps: list[int]
             ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T - first, V] of the rows from `first` on and tapped layer outputs
        [T, taps * H] of one whole prefill of text ids [T]."""
        self.model.model.rope_deltas = None
        result = self.model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False,
                            output_hidden_states=True)
        tapped = torch.cat([result.hidden_states[tap + 1][0] for tap in taps], -1)
        return result.logits[0, first:], tapped

    def _inputs(self, case: Case) -> dict[str, torch.Tensor]:
        self.model.model.rope_deltas = None
        ids = torch.from_numpy(case.ids.astype(np.int64))[None]
        config = self.model.config
        kinds = (ids == config.image_token_id) + 2 * (ids == config.video_token_id)
        inputs = {"input_ids": ids, "mm_token_type_ids": kinds.int()}
        for kind, values in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            mine = [i for i, k in enumerate(case.kinds) if k == kind]
            if mine:
                inputs[values] = torch.from_numpy(np.concatenate([case.patches[i] for i in mine]))
                inputs[f"{kind}_grid_thw"] = torch.tensor([case.grids[i] for i in mine])
        return inputs
