"""`load`, `question`, `generate`, `stream` on tiny checkpoints from files, in float32.

Three pairs share one target of three layers: with a drafter of random weights, alone, and with the
mock drafter, which knows the answer and makes rounds of a known length. Every request fits one
page, so that few programs serve all tests; the file is long because they share them.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mmflash_jax import generate as module
from mmflash_jax.config import ConfigError
from mmflash_jax.generate import PAGE, Options, Pair, Result, generate, load, question, stream
from mmflash_jax.images import InputError
from mmflash_jax.models.target import Target
from mmflash_jax.round import Models
from ports import CheckpointError
from tests.mock_drafter import ALL, MockDrafter, mock_config, mock_params
from tests.tiny import write_drafter, write_target
from tests.tiny_tokenizer import TOKENS

TAPS = (0, 1)
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.3}
HELLO = question("hello")
END = TOKENS["</think>"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    fields = write_target(root / "target", letters=3, layers=3, interval=3, mtp=False,
                          vision_depth=1)
    write_drafter(root / "draft", fields, layers=1, taps=TAPS, architecture="MMFlashDraftModel")
    return str(root / "target"), str(root / "draft")


@pytest.fixture(scope="module")
def pair(folders):
    return load(*folders, dtype="float32")


@pytest.fixture(scope="module")
def alone(folders):
    return load(folders[0], dtype="float32")


@pytest.fixture(scope="module")
def knowing(alone):
    """The target with the mock drafter, its programs its own."""
    config = alone.models.target.config
    models = Models(Target(config, TAPS, jnp.float32), MockDrafter(mock_config(config, TAPS)))
    return Pair(models, {**alone.params, "drafter": mock_params(1, PAGE)}, alone.chat)


def told(knowing: Pair, messages, ids: Iterable[int], right: int = ALL) -> Pair:
    """`knowing` with a drafter that is right about `right` leading drafts of the answer `ids`."""
    text = [*knowing.chat.build_prompt(messages).ids, *ids]
    rows = knowing.params["drafter"]
    rows["truth"][0] = np.pad(text, (0, PAGE - len(text)))
    rows["right"][0] = right
    return knowing


@pytest.fixture(scope="module")
def truth(alone) -> Result:
    """A greedy answer of 49 tokens, the first of which prefill gives."""
    return generate(alone, HELLO, Options(max_new_tokens=49, ignore_eos=True))


def facts(result: Result) -> dict:
    """What must not depend on the drafter."""
    return {name: getattr(result, name) for name in (
        "text", "reasoning", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason")}


def check(result: Result, options: Options) -> None:
    """What holds for every answer."""
    assert result.completion_tokens == len(result.token_ids) <= options.max_new_tokens
    assert result.finish_reason in ("stop", "length")
    assert isinstance(result.text, str) and result.reasoning != ""
    assert result.rounds == len(result.acceptance_lengths)
    if result.rounds:
        mean = sum(result.acceptance_lengths) / result.rounds
        assert math.isclose(result.acceptance_length, mean)
        # every round but the last gives all of its tokens
        assert sum(result.acceptance_lengths[:-1]) < len(result.token_ids) - 1 <= sum(
            result.acceptance_lengths)
    else:
        assert result.acceptance_length is None and len(result.token_ids) == 1
    json.dumps(dataclasses.asdict(result), allow_nan=False)


def picture(colour: str, size=(64, 64)) -> Image.Image:
    return Image.new("RGB", size, colour)


# --- the same answer with a drafter and without ---------------------------------------------------

@pytest.mark.parametrize("extra", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("text", ["hello", "Tell me a story.", "ä"])
def test_the_drafter_changes_rounds_only(pair, alone, text, extra):
    """Text, reasoning and ids, greedy and sampled (R32); plain decoding counts steps."""
    options = Options(max_new_tokens=40, **extra)
    with_it, without = (generate(p, question(text), options) for p in (pair, alone))
    assert facts(with_it) == facts(without)
    check(with_it, options)
    check(without, options)
    assert without.acceptance_lengths == [1] * (without.completion_tokens - 1)


def test_drafts_of_the_random_drafter_are_sometimes_right(pair):
    """Or the tests above would compare plain decoding with itself."""
    results = [generate(pair, question("hello" * n), Options(max_new_tokens=60)) for n in (1, 2, 3)]
    assert any(length > 1 for r in results for length in r.acceptance_lengths)


@pytest.mark.parametrize("extra", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_joined_deltas_are_the_answer(pair, extra):
    options = Options(max_new_tokens=40, **extra)
    *pieces, last = stream(pair, HELLO, options)
    assert len(pieces) > 1 and all(d.result is None for d in pieces)
    assert all(d.text or d.reasoning for d in pieces), "an empty delta"
    whole = "".join(d.text for d in [*pieces, last])
    thoughts = "".join(d.reasoning for d in [*pieces, last])
    assert whole == last.result.text and thoughts == (last.result.reasoning or "")
    assert facts(generate(pair, HELLO, options)) == facts(last.result)


def test_seeds(pair, alone):
    """R32: the same seed says the same, with a drafter or without, whatever ran before; another
    seed, also one that differs above 32 bits, says something else."""
    texts = {}
    for seed in (7, 8, 7 + 2**32):
        options = Options(max_new_tokens=24, seed=seed, **SAMPLED)
        texts[seed] = generate(pair, HELLO, options).token_ids
        assert generate(alone, HELLO, options).token_ids == texts[seed]
        assert generate(pair, HELLO, options).token_ids == texts[seed]
    assert len({tuple(ids) for ids in texts.values()}) == 3


def test_top_k_1_and_cold_sampling_are_greedy(pair):
    greedy = generate(pair, HELLO, Options(max_new_tokens=24)).token_ids
    for extra in ({"temperature": 1.5, "top_k": 1}, {"temperature": 1e-30},
                  {"temperature": 1.0, "min_p": 1.0}, {"temperature": 1.0, "top_p": 1e-9}):
        assert generate(pair, HELLO, Options(max_new_tokens=24, **extra)).token_ids == greedy


def test_penalties_act_on_greedy_answers(pair, alone):
    plain = generate(pair, HELLO, Options(max_new_tokens=40)).token_ids
    options = Options(max_new_tokens=40, frequency_penalty=2.0)
    varied = generate(pair, HELLO, options).token_ids
    assert len(set(varied)) > len(set(plain))
    assert generate(alone, HELLO, options).token_ids == varied


# --- rounds and limits ----------------------------------------------------------------------------

@pytest.mark.parametrize("most", [1, 2, 15, 16, 17, 18, 31, 33, 34, 49])
def test_r29_token_limits_and_rounds(knowing, truth, most):
    """R29: exactly as many tokens as asked for, and no round more than they need. Every round's
    entry is accepted drafts + 1, also where the limit cuts the block."""
    told(knowing, HELLO, truth.token_ids)
    options = Options(max_new_tokens=most, ignore_eos=True)
    pieces = list(stream(knowing, HELLO, options))
    result = pieces[-1].result
    check(result, options)
    assert result.token_ids == truth.token_ids[:most] and result.finish_reason == "length"
    assert result.rounds == -(-(most - 1) // 16)
    assert result.acceptance_lengths[:-1] == [16] * (result.rounds - 1)
    assert (result.decode_tokens_per_s is None) == (most == 1)
    said = "".join(d.reasoning + d.text for d in pieces)
    assert truth.reasoning.startswith(said.rstrip("\ufffd")) and said


@pytest.mark.parametrize("right", [0, 1, 6])
def test_rounds_of_a_known_length(knowing, truth, right):
    result = generate(told(knowing, HELLO, truth.token_ids, right), HELLO,
                      Options(max_new_tokens=49, ignore_eos=True))
    assert result.token_ids == truth.token_ids
    assert result.acceptance_lengths[:-1] == [right + 1] * (result.rounds - 1)
    assert result.rounds == -(-48 // (right + 1))


@pytest.mark.parametrize("room", [1, 2, 15, 16, 17])
def test_r46_context_limits(knowing, truth, alone, room):
    """R46: prompt and answer end at the limit, also in the middle of a block."""
    told(knowing, HELLO, truth.token_ids)
    limit = truth.prompt_tokens + room
    for pair in (knowing, alone):
        result = generate(pair, HELLO, Options(max_new_tokens=100, ignore_eos=True,
                                               context_length=limit))
        assert result.token_ids == truth.token_ids[:room]
        assert result.finish_reason == "length"
        assert result.prompt_tokens + result.completion_tokens == limit
    assert facts(generate(alone, HELLO, Options(max_new_tokens=49, ignore_eos=True))) == facts(
        truth), "the next request suffers"


def test_r46_prompts_over_the_limit_are_refused_before_any_work(alone, truth):
    prompt = truth.prompt_tokens
    known = dict(alone.programs)
    for limit in (prompt, prompt - 1):
        with pytest.raises(InputError, match=f"needs {prompt} tokens .* at most {limit - 1} "):
            stream(alone, HELLO, Options(context_length=limit))  # at the call, not at its first use
    with pytest.raises(InputError, match="context_length is 4097, .* 4096"):
        stream(alone, HELLO, Options(context_length=4097))
    with pytest.raises(InputError, match="at most 4095 are allowed"):
        stream(alone, question("x" * 5000))
    assert alone.programs == known


def test_only_what_a_request_needs_is_compiled(alone):
    fresh = dataclasses.replace(alone, programs={})
    said = []
    options = Options(max_new_tokens=1)
    list(stream(fresh, HELLO, options, report=lambda *what: said.append(what)))
    kinds = sorted(key[0] for key in fresh.programs)
    assert kinds == ["prefill", "start"]
    assert said == [("compiling", done, 2) for done in range(3)]
    list(stream(fresh, question("hello again"), options, report=lambda *what: said.append(what)))
    assert len(said) == 3, "compiled again"


# --- how an answer ends ---------------------------------------------------------------------------

@pytest.mark.parametrize("at", [0, 1, 5, 16, 17, 30])
def test_r2_stop_ids_inside_a_block(knowing, alone, truth, monkeypatch, at):
    """R2: the answer ends with the first stop id, which is in the ids and not in the text; the
    rounds are those it took."""
    stop = truth.token_ids[at]
    first = truth.token_ids.index(stop)
    told(knowing, HELLO, truth.token_ids)
    monkeypatch.setattr(knowing.chat, "stop_ids", (stop,))  # the chat of all three pairs
    fed = knowing.chat.text_stream((), True)
    without_it = [a + b for a, b in zip(fed.feed(truth.token_ids[:first]), fed.finish(),
                                        strict=True)]
    for pair in (knowing, alone):
        result = generate(pair, HELLO, Options(max_new_tokens=49))
        assert result.token_ids == truth.token_ids[:first + 1]
        assert result.completion_tokens == first + 1 and result.finish_reason == "stop"
        assert [result.reasoning or "", result.text] == without_it
        assert result.rounds == (first if pair is alone else -(-first // 16))
    again = generate(alone, HELLO, Options(max_new_tokens=49, ignore_eos=True))
    assert again.token_ids == truth.token_ids


def test_a_stop_id_on_the_last_allowed_place_is_a_stop(knowing, truth, monkeypatch):
    first = truth.token_ids.index(truth.token_ids[-1])
    monkeypatch.setattr(knowing.chat, "stop_ids", (truth.token_ids[-1],))
    result = generate(told(knowing, HELLO, truth.token_ids), HELLO,
                      Options(max_new_tokens=first + 1))
    assert result.finish_reason == "stop" and result.completion_tokens == first + 1


@pytest.mark.parametrize("at, size", [(1, 1), (3, 2), (9, 4), (15, 5), (30, 3)])
def test_stop_texts_inside_a_block_and_across_tokens(knowing, alone, truth, at, size):
    """The answer ends before the text, the ids with the token that completes it; rounds after it
    do not count, though the device has run them."""
    thoughts = truth.reasoning  # no character of the tiny model's greedy text is cut off
    stop = thoughts[at:at + size]
    begin = thoughts.index(stop)
    told(knowing, HELLO, truth.token_ids)
    for pair in (knowing, alone):
        *pieces, last = stream(pair, HELLO, Options(max_new_tokens=49, ignore_eos=True,
                                                    stop=("never said", stop)))
        result = last.result
        assert (result.reasoning or "") == thoughts[:begin] and result.text == ""
        assert "".join(d.reasoning for d in [*pieces, last]) == thoughts[:begin]
        assert result.finish_reason == "stop"
        ids = result.token_ids
        assert ids == truth.token_ids[:len(ids)]
        decoded = pair.chat.tokenizer.decode
        assert stop in decoded(ids) and stop not in decoded(ids[:-1])
        steps = len(ids) - 1
        assert result.rounds == (steps if pair is alone else -(-steps // 16))


def test_reasoning_ends_where_the_model_says_so(pair):
    """R5: thoughts before `</think>`, the answer after it, the mark in neither. The tiny model
    says it by chance, so that seeds are tried."""
    for seed in range(60):
        options = Options(max_new_tokens=40, temperature=1.0, seed=seed, ignore_eos=True)
        result = generate(pair, HELLO, options)
        if END in result.token_ids[5:30]:
            break
    decode = pair.chat.tokenizer.decode
    whole = decode(result.token_ids, skip_special_tokens=True)
    thoughts, _, answer = whole.partition("</think>")
    assert (result.reasoning or "", result.text) == (thoughts, answer)
    off = generate(pair, HELLO, options, reasoning=False)
    assert off.reasoning is None
    assert off.text == decode(off.token_ids, skip_special_tokens=True)


def test_reasoning_switch(pair):
    """None is the template's own default, which for this family is on."""
    options = Options(max_new_tokens=12, ignore_eos=True)
    default, on, off = (generate(pair, HELLO, options, reasoning=r) for r in (None, True, False))
    assert facts(default) == facts(on) and on.text == "" and on.reasoning
    assert off.reasoning is None and off.text and off.prompt_tokens > on.prompt_tokens
    assert facts(generate(pair, HELLO, options, enable_thinking=False)) == facts(off)


# --- pictures -------------------------------------------------------------------------------------

# The penalty keeps the tiny model from repeating one letter whatever it sees.
SEEN = Options(max_new_tokens=16, ignore_eos=True, frequency_penalty=0.5)


def test_r30_pictures_in_order(pair, alone):
    """R30: with the drafter on and off pictures count, in their order, each with its own tokens."""
    red, blue = picture("red"), picture("blue", (64, 96))
    answers = {}
    for name, images in (("none", []), ("red", [red]), ("both", [red, blue]),
                         ("turned", [blue, red])):
        with_it, without = (generate(p, question("what?", images), SEEN) for p in (pair, alone))
        assert facts(with_it) == facts(without)
        answers[name] = without
    tokens = {name: answer.prompt_tokens for name, answer in answers.items()}
    assert tokens["red"] - tokens["none"] == 4 + 2 and tokens["both"] - tokens["red"] == 6 + 2
    assert tokens["both"] == tokens["turned"]
    assert len({tuple(a.token_ids) for a in answers.values()}) == 4


def test_r30_text_between_pictures(pair, alone):
    messages = [{"role": "user", "content": [
        {"type": "text", "text": "A"}, {"type": "image", "image": picture("red")},
        {"type": "text", "text": "B"}, {"type": "image", "image": picture("blue")},
        {"type": "text", "text": "C"}]}]
    first, second = (generate(p, messages, SEEN) for p in (pair, alone))
    assert facts(first) == facts(second)
    messages[0]["content"].reverse()
    assert generate(pair, messages, SEEN).token_ids != first.token_ids


def test_video_after_a_picture(pair, alone, tmp_path):
    for i, colour in enumerate(("red", "green", "blue", "white", "black", "gray")):
        picture(colour).save(tmp_path / f"{i}.png")
    messages = question("what?", [picture("red", (96, 64))], str(tmp_path))
    kinds = [item["type"] for item in messages[0]["content"]]
    assert kinds == ["image", "video", "text"]
    first, second = (generate(p, messages, SEEN) for p in (pair, alone))
    assert facts(first) == facts(second)
    picture("yellow").save(tmp_path / "5.png")
    assert generate(pair, messages, SEEN).token_ids != first.token_ids


def test_a_picture_across_chunks(alone, monkeypatch):
    """R45: a prompt in chunks of 64 says what it says in one, with a picture on the border."""
    messages = question("Thirty letters before it: here", [picture("red")])
    messages[0]["content"] += question("what?", [picture("green", (160, 160))])[0]["content"]
    ids = alone.chat.build_prompt(messages).ids
    assert {int(i) for i in ids[62:66]} == {TOKENS["<|image_pad|>"]}
    whole = generate(alone, messages, SEEN)
    monkeypatch.setattr(module, "CHUNKS", (64,))
    assert facts(generate(alone, messages, SEEN)) == facts(whole)


def test_feature_rows_stand_where_their_pads_are(alone, monkeypatch, tmp_path):
    """R47: row after row in order of appearance, in whatever chunks; zeros everywhere else."""
    for i in range(6):
        picture("green").save(tmp_path / f"{i}.png")
    messages = question("Of these", [picture("red", (96, 64))], str(tmp_path))
    messages[0]["content"] += question("what?", [picture("blue", (160, 160))])[0]["content"]
    prompt = alone.chat.build_prompt(messages)
    pads = np.isin(prompt.ids, [TOKENS["<|image_pad|>"], TOKENS["<|video_pad|>"]])
    monkeypatch.setattr(module, "CHUNKS", (64,))
    monkeypatch.setattr(module._Run, "_compile", lambda *_: None)
    run = module._Run(alone, prompt, SEEN, 4, None)
    config, count = alone.models.target.config, 0
    rows = []
    for batch, place in zip(run.batches, run.places, strict=True):
        some = np.full((*place.shape, config.hidden_size), -1, np.float32)  # -1: padding
        here = batch.frames * batch.rows
        some[:batch.frames, :batch.rows] = np.arange(count, count + here).reshape(
            batch.frames, -1, 1) + 1
        rows.append(jnp.asarray(some))
        count += here
    table = np.concatenate([np.asarray(run._place(
        padded, tuple(rows), run._places_in(start, valid, padded)))[:valid]
        for start, valid, padded in run.chunks])
    want = np.where(pads, np.cumsum(pads), 0)
    assert len(run.chunks) > 1 and count == pads.sum()
    np.testing.assert_array_equal(table, np.broadcast_to(want[:, None], table.shape))


def test_r47_limits_of_pictures(pair):
    big = [picture("red", (640, 640))]
    small, large = (generate(pair, question("?", big), Options(max_new_tokens=2), max_pixels=p)
                    for p in (64 * 64, 96 * 96))
    assert large.prompt_tokens - small.prompt_tokens == 9 - 4
    with pytest.raises(InputError, match=r"\(25 of pictures\), at most 29 are allowed"):
        stream(pair, question("?", big), Options(context_length=30))


# --- loading, and what is refused -----------------------------------------------------------------

def test_load_reports_bytes(folders):
    said = []
    load(*folders, dtype="float32", report=lambda *what: said.append(what))
    assert {what for what, _, _ in said} == {"loading drafter", "loading target"}
    for name in ("loading drafter", "loading target"):
        done = [d for what, d, _ in said if what == name]
        assert done == sorted(done) and done[-1] == max(t for what, _, t in said if what == name)


def copied(folder: str, to, **fields) -> str:
    """A copy of a model folder, its config changed at the top level."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **fields}))
    return str(to)


def test_wrong_pairs_are_refused_before_weights(folders, tmp_path):
    """R40: both values named, although no weight of either could be read."""
    target, draft = folders
    for name, value, message in (
            ("hidden_size", 64, "hidden_size is 64, the target's is 56"),
            ("vocab_size", 321, "vocab_size is 321, the target's is 320"),
            ("block_size", 2, "block_size is 2, expected at least 4")):
        to = tmp_path / name
        fields = {name: value}
        if name == "block_size":
            inner = json.loads((tmp_path.parent / draft / "config.json").read_text())
            fields["dflash_config"] = {**inner["dflash_config"], name: value}
        other = copied(draft, to, **fields)
        (to / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=message):
            load(target, other, dtype="float32")


def test_a_broken_target_is_refused_before_the_drafter_is_read(folders, tmp_path):
    target, draft = folders
    broken = copied(target, tmp_path / "broken")
    victim = next((tmp_path / "broken").glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-8])
    said = []
    with pytest.raises(CheckpointError, match=victim.name):
        load(broken, draft, dtype="float32", report=lambda *what: said.append(what))
    assert not said


@pytest.mark.parametrize("change, message", [
    ({"dtype": "float16"}, "'float16', expected one of .*bfloat16.*float32"),
    ({"drafter": "eagle9"}, "'eagle9', expected one of .*mmflash")])
def test_unknown_names_are_refused(folders, change, message):
    with pytest.raises(ValueError, match=message):
        load(*folders, **change)


@pytest.mark.parametrize("option, value", [
    ("max_new_tokens", 0), ("max_new_tokens", 1.5), ("max_new_tokens", None),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("top_p", math.nan), ("top_k", -1),
    ("top_k", 2.0), ("min_p", -0.1), ("min_p", 2), ("presence_penalty", 2.5),
    ("frequency_penalty", -3), ("seed", -1), ("seed", 2**64), ("stop", ""), ("stop", "word"),
    ("stop", ("",)), ("stop", (3,)), ("context_length", 1), ("context_length", 99.0)])
def test_options_out_of_range_are_refused(alone, option, value):
    with pytest.raises(InputError, match=f"^{option} is "):
        stream(alone, HELLO, Options(**{option: value}))


def test_numpy_numbers_are_options():
    Options(max_new_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.uint32(7)).check()


@pytest.mark.parametrize("messages, extra, message", [
    ("hello", {}, "expected a list"), ([], {}, "at least one message"),
    (HELLO, {"reasoning": "off"}, "reasoning is 'off', expected True, False"),
    (HELLO, {"tempo": 3}, "knows no 'tempo'"),
    (HELLO, {"reasoning": True, "enable_thinking": False}, "reasoning is on, but"),
    (question("?", ["no-such-file.png"]), {}, "no-such-file.png: no such file"),
    (question("?", video="nowhere"), {}, "nowhere: no such file")])
def test_prompts_that_cannot_be_built_are_refused(alone, messages, extra, message):
    with pytest.raises(InputError, match=message):
        stream(alone, messages, **extra)


def test_one_path_in_place_of_a_list_is_refused():
    with pytest.raises(InputError, match="images is 'photo.jpg', expected a list"):
        question("?", "photo.jpg")


def test_a_target_as_hf_saves_it_loads(folders, tmp_path):
    """The config keeps mtp_num_hidden_layers where the files have lost `mtp.*`."""
    folder = tmp_path / "saved"
    shutil.copytree(folders[0], folder)
    fields = json.loads((folder / "config.json").read_text())
    assert not fields["text_config"]["mtp_num_hidden_layers"]
    fields["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(fields))
    assert "mtp" not in load(folder, dtype="float32").params["target"]
