"""The measurements behind `python -m mmflash_jax.bench`: what is run, how it is timed, the rows.

Every row is a dict in the form that the result files keep: benchmark, geometry, drafter, slots,
context, tp, median_ms, p10_ms, p90_ms, limit_ms, and what belongs to that benchmark alone.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.bench import geometry
from mmflash_jax.config import PRESETS, drafter_config, read_json, target_config
from mmflash_jax.generate import CALL, PAGE
from mmflash_jax.models.vision import encode
from mmflash_jax.processor import Picture, positions_3d
from mmflash_jax.round import Models, admit, prefill_chunk
from mmflash_jax.round import rounds as run_rounds
from mmflash_jax.state import init_state
from ports.dflash import load_drafter
from ports.qwen35 import load_target

PCIE_BYTES_PER_S = 55e9  # host to device, PCIe 5 x16 in practice


def rounds(name: str, *, width: int, slots: list[int], contexts: list[int], repeat: int,
           with_decode: bool) -> list[dict]:
    """Time rounds of `width` rows at each number of slots and each context."""
    models, params = geometry.random_pair(name, width > 1)
    plain = Models(models.target.clone(taps=()))
    jobs = [(m, w, count, context) for count in slots for context in contexts
            for m, w in ([(plain, 1)] if with_decode else []) + [(models, width)]]
    with ThreadPoolExecutor() as pool:  # the compiler is single-threaded, programs are many
        programs = list(pool.map(lambda job: _compiled(params, *job), jobs))
    return [_time(name, params, program, *job, repeat)
            for program, job in zip(programs, jobs, strict=True)]


def _pages(context: int, width: int) -> int:
    return -(-(context + (CALL + 1) * width) // PAGE)


def _compiled(params: dict, models: Models, width: int, slots: int, context: int):
    """The program of CALL rounds, and the seconds that it took to compile."""
    pages = _pages(context, width)
    state = jax.eval_shape(lambda: geometry.filled_state(
        models, slots=slots, context=context, pages=pages, page=PAGE))
    begun = time.perf_counter()
    program = run_rounds.lower(models, params, state, CALL, width=width, pages=pages,
                               sampled=False).compile()
    return program, time.perf_counter() - begun


def _time(name: str, params: dict, compiled, models: Models, width: int, slots: int, context: int,
          repeat: int) -> dict:
    """Time `repeat` rounds in calls of CALL, the clock around each call, every call from the
    same context: the slots are set back between calls, the caches stay."""
    program, compile_s = compiled
    state = geometry.filled_state(models, slots=slots, context=context,
                                  pages=_pages(context, width), page=PAGE)
    memory = program.memory_analysis()
    times, tokens = [], []
    for _ in range(2 + -(-repeat // CALL)):
        at = jnp.full((slots,), context, jnp.int32)
        state = state.replace(slots=state.slots.replace(length=at, border=at // 16 * 16))
        jax.block_until_ready(state)
        begun = time.perf_counter()
        state, out, done = program(params, state)
        jax.block_until_ready(done)
        times.append((time.perf_counter() - begun) / CALL * 1e3)
        tokens.append(int(out.count.sum()) / CALL / slots)
    return row("decode" if width == 1 else "round", name, models.drafter is not None,
               slots, context, times[2:],
               geometry.limit_ms(models, slots, context, width), width=width,
               compile_s=round(compile_s, 1), tokens_per_round=round(float(np.mean(tokens)), 2),
               program_gb=round((memory.argument_size_in_bytes + memory.output_size_in_bytes
                                 - memory.alias_size_in_bytes + memory.temp_size_in_bytes) / 1e9,
                                2) if memory else None)


def prefill(name: str, *, contexts: list[int], repeat: int) -> list[dict]:
    """Time a prompt of `context` tokens, three quarters of them one picture: vision tower, one
    prefill chunk, first token."""
    config = PRESETS[name]
    vision = config.vision
    assert vision is not None, "every preset has a vision tower"
    models, params = geometry.random_pair(name, True)
    seen = jax.jit(lambda p, *x: models.target.apply({"params": p}, *x, method="encode"))
    rng = np.random.default_rng(0)
    rows = []
    for context in contexts:
        side = int((0.75 * context) ** 0.5) // 2 * 2
        grid = (1, 2 * side, 2 * side)
        picture = Picture(rng.uniform(-1, 1, (4 * side**2, vision.patch_dim))
                          .astype(np.float32), grid)
        ids = rng.integers(0, 1000, context).astype(np.int32)
        marks = np.array([config.vision_start_token_id, config.image_token_id,
                          config.vision_end_token_id])
        ids[8:10 + side**2] = marks.repeat((1, side**2, 1))
        positions, delta = positions_3d(ids, [grid], config)
        state = init_state(config, models.drafter.config, slots=1,
                           pages_per_slot=-(-context // PAGE) + 1, page=PAGE, dtype=jnp.bfloat16)
        times, vision_times = [], []
        for i in range(repeat + 2):
            state = admit(state, jnp.int32(0), state.pages[0],
                          {"rope_delta": delta, "remaining": 100})
            jax.block_until_ready(state)
            begun = time.perf_counter()
            features = encode(lambda *x: seen(params["target"], *x), [picture], vision)[0]
            if i > 1:
                features.block_until_ready()
                vision_times.append((time.perf_counter() - begun) * 1e3)
            rows_of = jnp.zeros((context, config.hidden_size), jnp.bfloat16)
            rows_of = rows_of.at[9:9 + side**2].set(features)
            state, token = prefill_chunk(
                models, params, state, jnp.int32(0), ids, positions, jnp.int32(context), rows_of,
                True, sampled=False)
            token.block_until_ready()
            times.append((time.perf_counter() - begun) * 1e3)
        flops = 2 * context * (geometry.target_bytes(config, 1, 0) / 2
                               - config.vocab_size * config.hidden_size)
        rows.append(row("prefill", name, True, 1, context, times[2:], flops / 790e12 * 1e3,
                        vision_ms=round(float(np.median(vision_times)), 2),
                        picture_tokens=side**2))
    return rows


def load(target: Path, draft: Path | None) -> list[dict]:
    """Time reading the checkpoints in `target` and `draft` (HF folders) onto the device, once.
    The geometry is the preset with these sizes, or the folder's name."""
    config = target_config(read_json(target / "config.json"))
    begun = time.perf_counter()
    params = load_target(target, config)
    if draft is not None:
        own = drafter_config(read_json(draft / "config.json"))
        params["drafter"] = load_drafter(draft, own)
    jax.block_until_ready(params)
    took = (time.perf_counter() - begun) * 1e3
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    name = next((name for name, preset in PRESETS.items()
                 if preset.hidden_size == config.hidden_size
                 and preset.layer_types == config.layer_types), target.name)
    return [row("load", name, draft is not None, 1, 0, [took],
                size / PCIE_BYTES_PER_S * 1e3, gigabytes=round(size / 1e9, 2))]


def row(benchmark: str, name: str, drafter: bool, slots: int, context: int, times: list[float],
        limit: float, **more) -> dict:
    """One result: percentiles of `times` (ms) beside `limit` (ms), and the card's peak memory."""
    low, middle, high = (round(float(x), 3) for x in np.percentile(times, (10, 50, 90)))
    used = jax.devices()[0].memory_stats() or {}
    return {"benchmark": benchmark, "geometry": name,
            "drafter": "mmflash" if drafter else "none", "slots": slots,
            "context": context, "tp": 1, "median_ms": middle, "p10_ms": low, "p90_ms": high,
            "limit_ms": round(limit, 3), **more,
            "process_peak_gb": round(used.get("peak_bytes_in_use", 0) / 1e9, 2)}


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table, columns in order of first appearance."""
    names = list(dict.fromkeys(name for r in rows for name in r))
    lines = [names, ["---"] * len(names)] + [[str(r.get(n, "")) for n in names] for r in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
