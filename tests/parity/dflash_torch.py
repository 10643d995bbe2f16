"""The drafter's oracle: the model of PyPI `dflash`, driven without any cache.

In: a drafter folder, target features, the target's embedding and head. Out: numpy arrays. Needs
torch and `dflash`. Only that package's model is used: its generation loop cuts back HF's cache,
which leaves this target's recurrent state wrong, and it shortens the last blocks.
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlashDraftModel

from tests.parity.hf import Target


class Drafter:
    """A drafter folder loaded by `dflash`, bound to the target whose head it uses."""

    def __init__(self, folder: Path, target: Target):
        self.model, report = DFlashDraftModel.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True)
        faults = {kind: names for kind, names in report.items() if names}
        assert not faults, f"{folder}: dflash loads it with faults: {faults}"
        self.model.eval()
        self.target = target
        self.taps = list(self.model.target_layer_ids)
        self.block = self.model.block_size

    @torch.no_grad()
    def draft(self, anchor: int, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """features [p0, taps * H] of the tokens before the anchor -> normed hidden rows [B, H]
        and logits [B, V]; row j stands for position p0 + j, row 0 is of no use."""
        ids = torch.tensor([[anchor] + [self.model.mask_token_id] * (self.block - 1)])
        embedding = self.target.model.get_input_embeddings().weight
        hidden = self.model(
            position_ids=torch.arange(len(features) + self.block)[None],
            noise_embedding=torch.nn.functional.embedding(ids, embedding),
            target_hidden=features[None])
        return hidden[0], self.model.compute_logits(hidden, self.target.model.lm_head)[0]


@dataclasses.dataclass(frozen=True)
class Output:
    """What the greedy loop gives: tokens [n], and accepted drafts + 1 of every round."""

    tokens: np.ndarray
    acceptance_lengths: tuple[int, ...]
    smallest_gap: float  # between the two best logits, over all draft and verify rows that count


def greedy_loop(drafter: Drafter, ids: np.ndarray, count: int, stop_ids: tuple[int, ...] = ()
                ) -> Output:
    """Draft, verify, accept until `count` tokens or a stop id, the target prefilled anew in every
    round. Every round drafts a whole block and counts a + 1, also the last one."""
    target = drafter.target
    sequence, rounds, gap = [int(i) for i in ids], [], np.inf
    logits, _ = target.rows(ids, len(ids) - 1, drafter.taps)
    sequence.append(int(logits[0].argmax()))
    while len(sequence) - len(ids) < count and sequence[-1] not in stop_ids:
        start = len(sequence) - 1
        known = np.asarray(sequence, np.int32)
        _, features = target.rows(known[:start], 0, drafter.taps)
        _, drafts = drafter.draft(sequence[start], features)
        drafted = drafts[1:].argmax(-1)
        rows, _ = target.rows(np.concatenate([known, drafted.numpy()]), start, drafter.taps)
        own = rows.argmax(-1)
        accepted = int((own[:-1] == drafted).int().cumprod(0).sum())
        for logits_row in (*drafts[1:accepted + 2], *rows[:accepted + 1]):
            best = logits_row.topk(2).values
            gap = min(gap, float(best[0] - best[1]))
        rounds.append(accepted + 1)
        for token in own[:accepted + 1].tolist():
            sequence.append(token)
            if token in stop_ids or len(sequence) - len(ids) == count:
                break
    return Output(np.asarray(sequence[len(ids):], np.int32), tuple(rounds), gap)
