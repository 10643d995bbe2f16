"""The vision tower against HF's `Qwen3_5VisionModel`, live, in float32: features of images and
videos to 1e-4, and the geometry of frames on the published 48 x 48 position table."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config import PRESETS, VisionConfig
from mmflash_jax.models.vision import Vision, encode, frame_geometry

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen3_5")

CONFIG = VisionConfig(depth=3, hidden_size=48, num_heads=4, intermediate_size=56, patch_size=4,
                      temporal_patch_size=2, spatial_merge_size=2, in_channels=3,
                      num_position_embeddings=81, out_hidden_size=40)
GRIDS = [(1, 4, 6), (1, 2, 2), (3, 6, 4), (1, 10, 22), (1, 18, 2)]


@pytest.fixture(scope="module")
def oracle():
    """HF's model with every weight and bias random."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    fields = {k: v for k, v in dataclasses.asdict(CONFIG).items() if k != "rope_theta"}
    config = Qwen3_5VisionConfig(**fields, hidden_act="gelu_pytorch_tanh")
    config._attn_implementation = "eager"
    model = Qwen3_5VisionModel(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            flat = parameter[0].numel() if parameter.ndim > 1 else 1
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.4 * random if norm else 1.3 * random / flat**0.5)
    return model


def runtime_params(model):
    """HF's names to the runtime tree."""
    state = {k: jnp.asarray(v.numpy()) for k, v in model.state_dict().items()}

    def pair(name):
        return {"weight": state[f"{name}.weight"], "bias": state[f"{name}.bias"]}

    patch = pair("patch_embed.proj")
    patch["weight"] = patch["weight"].reshape(CONFIG.hidden_size, -1)
    params = {"patch": patch, "pos_embed": state["pos_embed.weight"],
              "merger": {"norm": pair("merger.norm"), "fc1": pair("merger.linear_fc1"),
                         "fc2": pair("merger.linear_fc2")}}
    names = {"norm1": "norm1", "norm2": "norm2", "qkv": "attn.qkv", "proj": "attn.proj",
             "fc1": "mlp.linear_fc1", "fc2": "mlp.linear_fc2"}
    for i in range(CONFIG.depth):
        params[f"blocks_{i}"] = {k: pair(f"blocks.{i}.{v}") for k, v in names.items()}
    return params


def test_features(oracle):
    rng = np.random.default_rng(1)
    pictures = [types.SimpleNamespace(
        patches=rng.normal(size=(np.prod(grid), CONFIG.patch_dim)).astype(np.float32), grid=grid)
        for grid in GRIDS]
    params = runtime_params(oracle)
    apply = jax.jit(lambda *x: Vision(CONFIG, jnp.float32).apply({"params": params}, *x))
    mine = encode(apply, pictures, CONFIG)
    with torch.no_grad():
        theirs = oracle(torch.from_numpy(np.concatenate([p.patches for p in pictures])),
                        torch.tensor(GRIDS)).pooler_output.numpy()
    ends = np.cumsum([np.prod(grid) // 4 for grid in GRIDS])
    for grid, rows, wanted in zip(GRIDS, mine, np.split(theirs, ends[:-1]), strict=True):
        assert rows.shape == wanted.shape
        assert np.abs(np.asarray(rows) - wanted).max() <= 1e-4 * np.abs(wanted).max(), grid


@pytest.mark.parametrize("height,width", [(2, 2), (48, 48), (30, 74), (256, 256), (2, 94)])
def test_geometry(height, width):
    from transformers import vision_utils

    config = PRESETS["qwen3.5-9b"].vision
    grid = torch.tensor([[1, height, width]])
    index, share = vision_utils.get_vision_interpolation_indices_and_weights(
        grid, 48, mode="bilinear", align_corners=True, spatial_merge_size=2)
    corner, weight, cells = frame_geometry(height, width, config)
    assert np.array_equal(corner, index.numpy())
    np.testing.assert_allclose(weight, share.numpy(), atol=1e-6)
    positions = vision_utils.get_vision_position_ids(grid, 2).numpy()
    assert np.array_equal(cells, positions if positions.shape[-1] == 2 else positions.T)
