"""A drafter that knows the answer, and is right for exactly as many drafts as a test asks.

In, as parameters: `truth` [R, L], the token at every position of each slot's sequence, and
`right` [R, L]: how many leading drafts to get right in a round whose anchor stands at that
position. Its context rows hold the taps and the position they were made for, so that a test can
read from the context which row was stored where. Satisfies `drafters.Drafter`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.config import DrafterConfig, RopeConfig, TargetConfig

ALL = 15  # right for a whole block


class MockDrafter(nn.Module):
    """Draft i (from 0) is the truth while i < right, and the id after it from there on."""

    config: DrafterConfig
    dtype: jnp.dtype = jnp.float32

    def extend(self, taps: jax.Array, positions: jax.Array):
        """One layer: keys [M, K, D] are the first taps, values their position."""
        c = self.config
        shape = (len(taps), c.num_key_value_heads, c.head_dim)
        keys = taps[:, :c.num_key_value_heads * c.head_dim].reshape(shape)
        values = jnp.broadcast_to(positions[:, None, None].astype(self.dtype), shape)
        return (keys,), (values,)

    def draft(self, embed, head, anchor, length, keys, values, rows):
        truth, right = (self.get_variable("params", n) for n in ("truth", "right"))
        at = jnp.minimum(length[:, None] + 1 + jnp.arange(rows), truth.shape[1] - 1)
        ids = jnp.take_along_axis(truth, at, 1)
        many = jnp.take_along_axis(right, length[:, None], 1)
        return jnp.where(jnp.arange(rows) < many, ids, (ids + 1) % embed.shape[0])


def mock_config(target: TargetConfig, taps: tuple[int, ...]) -> DrafterConfig:
    """One layer of two small heads."""
    return DrafterConfig(
        hidden_size=target.hidden_size, intermediate_size=8, num_attention_heads=2,
        num_key_value_heads=2, head_dim=20, vocab_size=target.vocab_size, rms_norm_eps=1e-6,
        max_position_embeddings=target.max_position_embeddings, rope=RopeConfig(1e7, 20),
        block_size=16, mask_token_id=0, target_layer_ids=taps,
        num_target_layers=target.num_hidden_layers, windows=(None,), causal=(False,))


def mock_params(slots: int, positions: int) -> dict[str, np.ndarray]:
    """Always wrong about an unknown text, until a test fills in the rows of its slots."""
    return {name: np.zeros((slots, positions), np.int32) for name in ("truth", "right")}
