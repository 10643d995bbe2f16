"""Reference outputs of the torch oracles: computed live, or read from the committed files.

In: the name of a group. Out: a flat dict of arrays, keys "case/prompt/what". Computing needs
torch, reading does not. The committed files hold a few rows of each output
(`scripts/make_references.py` writes them), a live reference holds every row. Each group records
for which checkpoints it was made.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.parity import cases

FOLDER = Path(__file__).parent / "references"
CONTEXTS = (1, 7, 40)  # lengths of the drafter's context
ANCHOR = ord("a")
GREEDY_TARGET = "plain"
GREEDY_TOKENS, PICTURE_TOKENS, LOOP_TOKENS = 200, 60, 80
LOOPS = ("letters", "letters_mixed")
LOOP_TEXTS = (0, 3, 7)  # of cases.TEXTS
NEAR_TIE = 2e-4  # a greedy choice nearer than this may fall either way in float32


def load(group: str) -> dict[str, np.ndarray]:
    """The committed references of `group`. Raises AssertionError when they were made for other
    checkpoints than those that the tests write now."""
    with np.load(FOLDER / f"{group}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    for name, now in _fingerprints(group):
        assert str(arrays.pop(name)) == now, (
            f"{group}.npz: {name} differs from the checkpoint written now: "
            "run scripts/make_references.py")
    return arrays


def save(group: str, folder: Path) -> Path:
    """Compute `group` and write it to `folder`; returns the file. Needs torch."""
    arrays = compute(group, full=False) | dict(_fingerprints(group))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{group}.npz", **arrays)
    return folder / f"{group}.npz"


def compute(group: str, *, full: bool) -> dict[str, np.ndarray]:
    """The references of `group`, all rows or the few that are committed. Needs torch."""
    return dict(GROUPS[group](full))


def _fingerprints(group: str) -> Iterator[tuple[str, str]]:
    for name in FILES[group]:
        with tempfile.TemporaryDirectory() as folder:
            if name in cases.DRAFTERS and group != "target":
                target, drafter = cases.write_pair(name, Path(folder))
                yield f"fingerprint/{name}/target", cases.fingerprint(target)
                yield f"fingerprint/{name}/drafter", cases.fingerprint(drafter)
            else:
                target = cases.write_target(name, Path(folder))
                yield f"fingerprint/{name}", cases.fingerprint(target)


def _target(full: bool) -> Iterator[tuple[str, np.ndarray]]:
    """For each target case and prompt the arrays of `hf.Target.forward` at the rows in "rows",
    and "features_i" for each picture."""
    from tests.parity import hf

    for name in cases.TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            oracle = hf.Target(cases.write_target(name, Path(folder)))
        for prompt, case in cases.prompts_of(name).items():
            at = f"{name}/{prompt}"
            arrays = oracle.forward(case)
            length = len(case.ids)
            rows = np.arange(length) if full else np.unique([0, length // 3, length - 2,
                                                            length - 1])
            yield f"{at}/rows", rows
            yield f"{at}/logits", arrays.pop("logits")[rows]
            yield f"{at}/hidden", arrays.pop("hidden")[:, rows]
            states = [key for key in arrays if key.startswith("state_")]
            for key, value in arrays.items():
                some = key.startswith(("state", "conv")) and key not in (
                    states[0], states[-1], states[-1].replace("state", "conv"))
                if key != "final" and (full or not some):
                    yield f"{at}/{key}", value
            for i, features in enumerate(oracle.features(case)):
                yield f"{at}/features_{i}", features


def _drafter(full: bool) -> Iterator[tuple[str, np.ndarray]]:
    """For each drafter case and context length the normed hidden rows and the logits."""
    import torch

    from tests.parity import dflash_torch, hf

    for name in cases.DRAFTERS:
        with tempfile.TemporaryDirectory() as folder:
            target, drafter = cases.write_pair(name, Path(folder))
            oracle = dflash_torch.Drafter(drafter, hf.Target(target))
        for length in CONTEXTS:
            features = torch.from_numpy(cases.context_features(name, length))
            hidden, logits = oracle.draft(ANCHOR, features)
            yield f"{name}/{length}/hidden", hidden.numpy()
            if full or length == CONTEXTS[-1]:
                yield f"{name}/{length}/logits", logits.numpy()


def _generation(full: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Greedy tokens of the target alone after each text and each prompt with pictures, and the
    tokens and acceptance lengths of the speculative loop."""
    from tests.parity import dflash_torch, hf

    with tempfile.TemporaryDirectory() as folder:
        oracle = hf.Target(cases.write_target(GREEDY_TARGET, Path(folder)))
    for i, words in enumerate(cases.TEXTS):
        yield f"greedy/{i}", _sure(oracle.greedy(cases.text(words), GREEDY_TOKENS), words)
    for prompt, case in cases.prompts().items():
        if case.kinds:
            yield f"greedy/{prompt}", _sure(oracle.greedy(case, PICTURE_TOKENS), prompt)
    for name in LOOPS:
        with tempfile.TemporaryDirectory() as folder:
            target, drafter = cases.write_pair(name, Path(folder))
            pair = dflash_torch.Drafter(drafter, hf.Target(target))
        for i in LOOP_TEXTS:
            ids = cases.text(cases.TEXTS[i]).ids
            out = dflash_torch.greedy_loop(pair, ids, LOOP_TOKENS)
            yield f"loop/{name}/{i}/tokens", _sure((out.tokens, out.smallest_gap), (name, i))
            yield f"loop/{name}/{i}/lengths", np.asarray(out.acceptance_lengths, np.int32)
            stop = stop_token(out.tokens, out.acceptance_lengths)
            out = dflash_torch.greedy_loop(pair, ids, LOOP_TOKENS, (stop,))
            yield f"loop/{name}/{i}/stopped_tokens", out.tokens
            yield f"loop/{name}/{i}/stopped_lengths", np.asarray(out.acceptance_lengths, np.int32)


def _sure(found: tuple[np.ndarray, float], where) -> np.ndarray:
    tokens, gap = found
    assert gap > NEAR_TIE, f"{where}: two logits are only {gap:.1e} apart: choose another prompt"
    return tokens


def stop_token(tokens: np.ndarray, lengths) -> int:
    """A token whose first place is an accepted draft with more of its block after it, so that as
    a stop id it ends the text inside a block (R2); if there is none, the latest newcomer."""
    first, start = {int(t): i for i, t in reversed(list(enumerate(tokens)))}, 1
    for length in lengths:
        for i in range(start, min(start + length - 1, len(tokens))):
            if first[int(tokens[i])] == i:
                return int(tokens[i])
        start += length
    return max(first, key=first.__getitem__)


GROUPS = {"target": _target, "drafter": _drafter, "generation": _generation}
FILES = {"target": tuple(cases.TARGETS), "drafter": tuple(cases.DRAFTERS),
         "generation": (GREEDY_TARGET, *LOOPS)}
