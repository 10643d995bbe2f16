"""`gdn_round_mgpu` against its reference: interpreted, lowered for the card, and on the card."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mmflash_jax.kernels.gdn_round import BORDER, WINDOW, gdn_round
from mmflash_jax.kernels.gdn_round_mgpu import gdn_round_mgpu

interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this jax cannot interpret Mosaic GPU kernels")


def window(slots, key_heads, heads, used=40, seed=0):
    """Arguments of the operation: `used` of 48 rows real, every second slot moves."""
    rng = np.random.default_rng(seed)
    rows = WINDOW * BORDER
    real = (np.arange(rows) < used)[None, :, None]

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    q, k, v = (jnp.where(real[..., None], normal(slots, rows, n, 128), 0).astype(jnp.bfloat16)
               for n in (key_heads, key_heads, heads))
    beta = jnp.where(real, jax.nn.sigmoid(normal(slots, rows, heads)), 0)
    decay = jnp.where(real, jnp.exp(-jnp.abs(normal(slots, rows, heads))), 1)
    return normal(slots, heads, 128, 128), jnp.arange(slots) % 2 == 0, q, k, v, beta, decay


def close(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max()))


@interpreter
@pytest.mark.parametrize("heads", [(1, 2), (2, 2), (1, 3)])
def test_interpreted_kernel_is_the_reference(heads):
    arguments = window(2, *heads)
    close(gdn_round_mgpu(*arguments, interpret=plgpu.InterpretGPUParams()),
          jax.jit(gdn_round)(*arguments))


@interpreter
def test_substitution_survives_equal_keys_without_decay():
    """Sixteen equal keys written in full: inverses by powers of A lose every digit here."""
    state, moved, q, k, v, beta, decay = window(1, 1, 1, used=48)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    arguments = state, moved, q, k, v, jnp.ones_like(beta), jnp.ones_like(decay)
    close(gdn_round_mgpu(*arguments, interpret=plgpu.InterpretGPUParams()),
          jax.jit(gdn_round)(*arguments))


@interpreter
def test_lowers_for_the_card():
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    card = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=card)):
        lowered = jax.jit(gdn_round_mgpu).trace(*window(2, 2, 4)).lower(
            lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("heads", [(16, 32), (16, 48)])
def test_kernel_is_the_reference(slots, heads):
    arguments = window(slots, *heads)
    close(jax.jit(gdn_round_mgpu)(*arguments), jax.jit(gdn_round)(*arguments))


@pytest.mark.gpu
def test_kernel_is_bit_equal_wherever_a_chunk_sits():
    """R49: the same 16 tokens as second chunk of the window, and as third after empty rows."""
    state, _, q, k, v, beta, decay = window(4, 16, 32, used=48)
    run = jax.jit(gdn_round_mgpu)
    still = jnp.zeros((4,), bool)

    def one_chunk(place):
        def put(x, empty):
            rows = jnp.full_like(x, empty)
            return rows.at[:, place * BORDER:(place + 1) * BORDER].set(x[:, :BORDER])

        out, _ = run(state, still, put(q, 0), put(k, 0), put(v, 0), put(beta, 0), put(decay, 1))
        return out[:, (place - 1) * BORDER:place * BORDER]

    np.testing.assert_array_equal(one_chunk(1), one_chunk(2))


@pytest.mark.gpu
def test_kernel_moves_by_the_bits_of_a_later_chunk():
    """Folding chunk 0 in and reading chunk 1 equals reading chunk 2 behind chunk 1."""
    state, _, q, k, v, beta, decay = window(4, 16, 32, used=48)
    run = jax.jit(gdn_round_mgpu)
    behind, _ = run(state, jnp.zeros((4,), bool), *(jnp.roll(x, BORDER, 1) for x in (
        q, k, v, beta, decay)))
    moved, _ = run(state, jnp.ones((4,), bool), q, k, v, beta, decay)
    np.testing.assert_array_equal(behind[:, BORDER:], moved[:, :BORDER])
