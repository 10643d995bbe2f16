"""The small world: scenes, pictures, questions, labelled answers, and its tokenizer."""

import collections
import dataclasses
import functools
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mmflash_jax.chat import Chat
from mmflash_jax.config import PRESETS
from mmflash_jax.processor import image_grid
from mmflash_jax.train import world
from mmflash_jax.train.world import SHAPES, Bars, Grid, Label, Lines, Span, Story, Table
from mmflash_jax.train.world_draw import INK, RGB, SIZE, TALL, TOKEN, draw, line_height, text_mask
from mmflash_jax.train.world_scenes import (
    HIGHEST,
    KINDS,
    LOWEST,
    SPLITS,
    Bar,
    Cell,
    Line,
    Scene,
    band,
    scene,
    split_of,
)
from mmflash_jax.train.world_tokenizer import (
    SPECIAL,
    VOCABULARY,
    answer_tokens,
    example,
    messages,
    token_ids,
    words,
    write_tokenizer,
)

PER_SPLIT = 500
SAMPLES = [world.sample(5, i, split) for split in SPLITS for i in range(PER_SPLIT)]
NUMBER = re.compile(r"\d+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("world")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def chat(folder):
    ids = token_ids()
    return Chat(folder, dataclasses.replace(
        PRESETS["qwen3.5-9b"], vocab_size=VOCABULARY, max_position_embeddings=1024,
        eos_token_ids=(ids["<|endoftext|>"],), image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"]))


def test_seed_split_and_index_alone_give_a_sample():
    again = [world.sample(5, i, "train") for i in reversed(range(40))][::-1]
    assert again == SAMPLES[:40]
    others = [world.sample(6, i, "train") for i in range(40)]
    assert all(a.scene != b.scene for a, b in zip(again, others, strict=True))
    picture = next(one.scene for one in again if one.scene.has_picture)
    assert draw(picture).tobytes() == draw(picture).tobytes()


def test_another_process_makes_the_same_samples():
    """Nothing hangs on the hash seed of a process."""
    code = ("from mmflash_jax.train import world; import hashlib; print(hashlib.sha256(repr("
            "[world.sample(5, i, 'held-out') for i in range(60)]).encode()).hexdigest())")
    found = {subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, text=True,
                            capture_output=True, check=True).stdout for seed in "12"}
    assert len(found) == 1


def test_a_content_belongs_to_one_split_whatever_the_seed():
    for i, one in enumerate(SAMPLES):
        assert split_of(one.scene.content) == SPLITS[i // PER_SPLIT]
    contents = {split: {scene(seed, i, split).content for seed in (1, 2) for i in range(400)}
                for split in SPLITS}
    assert not contents["train"] & contents["held-out"]


def test_the_split_does_not_look_at_what_is_not_asked():
    assert {f.name for f in dataclasses.fields(Scene)} == {"kind", "content", "look"}
    one = scene(1, 0, "train")
    assert split_of(dataclasses.replace(one, look=one.look + 1).content) == split_of(one.content)


@pytest.mark.parametrize("split, index, message", [
    ("test", 0, "split is 'test', expected one of train, held-out"),
    ("train", -1, "index is -1, expected at least 0")])
def test_what_is_no_scene_is_refused(split, index, message):
    with pytest.raises(ValueError, match=message):
        world.sample(0, index, split)


def test_kinds_are_balanced_and_the_questions_of_a_scene_differ():
    kinds = collections.Counter(scene(9, i, "train").kind for i in range(1000))
    assert set(kinds) == set(KINDS) and min(kinds.values()) > 140
    for first in range(0, PER_SPLIT, world.QUESTIONS):
        group = SAMPLES[first:first + world.QUESTIONS]
        assert len({one.scene for one in group}) == 1
        assert len({one.asked for one in group}) == len(group)


def grid_answer(grid, task, args):
    cells = [cell for row in grid.rows for cell in row]
    if task == "number":
        return next(c.number for c in cells if f"{c.colour} {c.shape}" == args[0])
    if task == "count colour":
        return sum(c.colour == args[0] for c in cells)
    if task == "count shape":
        return sum(c.shape == args[0] for c in cells)
    if task == "sum of row":
        return sum(c.number for c in grid.rows[int(args[0]) - 1])
    cells.sort(key=lambda c: c.number)
    chosen = {"largest": cells[-1], "smallest": cells[0]}[task]
    return f"{chosen.colour} {chosen.shape}"


def bars_answer(chart, task, args):
    value = {bar.name: bar.value for bar in chart.bars}
    if task == "value":
        return value[args[0]]
    if task == "value of colour":
        return {bar.colour: bar.value for bar in chart.bars}[args[0]]
    if task == "sum":
        return value[args[0]] + value[args[1]]
    if task == "difference":
        return abs(value[args[0]] - value[args[1]])
    if task == "higher":
        return args[0] if value[args[0]] > value[args[1]] else args[1]
    return {"order": ", ".join(sorted(value, key=value.__getitem__))}[task]


def table_answer(table, task, args):
    entry = {(r, c): table.values[i][j]
             for i, r in enumerate(table.rows) for j, c in enumerate(table.columns)}
    if task == "entry":
        return entry[args]
    if task == "sum of row":
        return sum(entry[args[0], c] for c in table.columns)
    if task == "sum of column":
        return sum(entry[r, args[0]] for r in table.rows)
    if task == "difference":
        return abs(entry[args[0], args[1]] - entry[args[0], args[2]])
    order = sorted(table.columns, key=lambda c: entry[args[0], c])
    return {"largest": order[-1], "smallest": order[0]}[task]


def lines_answer(chart, task, args):
    ends = {line.colour: (line.start, line.end) for line in chart.lines}
    if task in ("start", "end"):
        return ends[args[0]][task == "end"]
    if task == "turn":
        return "rise" if ends[args[0]][1] > ends[args[0]][0] else "fall"
    if task == "change":
        return abs(ends[args[0]][1] - ends[args[0]][0])
    order = sorted(ends, key=lambda colour: ends[colour][args[0] == "end"])
    return {"largest": order[-1], "smallest": order[0]}[task]


def story_answer(story, task, args):
    one, two = story.numbers
    if task in ("sum", "difference"):
        return one + two if task == "sum" else abs(one - two)
    most, least = story.people if one > two else story.people[::-1]
    return {"largest": most, "smallest": least}[task]


SOLVERS = {Grid: grid_answer, Bars: bars_answer, Table: table_answer, Lines: lines_answer,
           Story: story_answer}


def test_answers_are_right_by_the_scene_s_own_data():
    seen = set()
    for one in SAMPLES:
        task, *args = one.asked
        wanted = str(SOLVERS[type(one.scene.content)](one.scene.content, task, tuple(args)))
        assert one.final == wanted == world.final_answer(one.text), one.question
        seen.add((one.scene.kind, task))
    assert len(seen) == 28  # every task of every kind


def test_questions_name_what_they_ask_for():
    for one in SAMPLES:
        for name in one.asked[1:]:
            assert re.search(rf"\b{SHAPES.get(name, name)}\b", one.question), one.asked


def test_sums_and_differences_in_answers_hold():
    sums = re.compile(r"(\d+) ([+-]) (\d+) = (\d+)")
    steps = [step for one in SAMPLES for step in sums.findall(one.text)]
    assert len(steps) > 300
    for a, sign, b, result in steps:
        assert int(a) + (1 if sign == "+" else -1) * int(b) == int(result)


def contents_of(content):
    """All that a description has to say, in its order."""
    if isinstance(content, Grid):
        return [str(len(content.rows))] + [
            f"{c.colour} {c.shape} {c.number}" for row in content.rows for c in row]
    if isinstance(content, Bars):
        return [str(len(content.bars))] + [
            str(x) for b in content.bars for x in (b.name, b.colour, b.value)]
    if isinstance(content, Table):
        rows = zip(content.rows, content.values, strict=True)
        return [*content.columns] + [str(x) for name, row in rows for x in (name, *row)]
    if isinstance(content, Lines):
        return [str(len(content.lines))] + [
            str(x) for line in content.lines for x in (line.colour, line.start, line.end)]
    return []


def test_visual_spans_are_what_the_scene_shows_and_nothing_else():
    for one in SAMPLES:
        visual = [span.text for span in one.answer if span.label == Label.VISUAL]
        assert visual == contents_of(one.scene.content)


def test_copied_spans_were_said_before():
    for one in SAMPLES:
        said = one.question
        for span in one.answer:
            whole_order = one.asked == ("order",) and span.text == one.final
            if span.label == Label.COPIED and not whole_order:
                assert re.search(rf"\b{re.escape(span.text)}\b", said), (span, said)
            said += span.text


def test_numbers_of_the_scene_are_no_template():
    for one in SAMPLES:
        template = "".join(span.text for span in one.answer if span.label == Label.TEMPLATE)
        numbers = NUMBER.findall(template)
        rows = len(one.scene.content.rows) if isinstance(one.scene.content, Grid) else 0
        assert numbers == [str(i + 1) for i in range(rows)]  # "Row 1:" of a grid


def test_every_wording_is_used_and_words_vary():
    openings = collections.Counter(one.text.split("\n")[0].split(".")[0][:12] for one in SAMPLES)
    assert len(openings) >= 9


def ink(image, colour):
    return (np.asarray(image) == colour).all(-1)  # [height, width]


def token(image, row, column):
    return image.crop((TOKEN * column, TOKEN * row, TOKEN * (column + 1), TOKEN * (row + 1)))


def written(image):
    """The text in one token: the only one whose ink has these pixels; None without ink."""
    found = ink(image, INK)
    if not found.any():
        return None
    rows, columns = np.flatnonzero(found.any(1)), np.flatnonzero(found.any(0))
    crop = found[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]
    assert 0 < rows[0] and rows[-1] < TOKEN - 1 and 0 < columns[0] and columns[-1] < TOKEN - 1
    texts = [*map(str, range(LOWEST, HIGHEST + 1)), *"ABCDEFKLMNPT"]
    hits = [text for text in texts for tall in TALL if (mask := cropped(text, tall)).shape
            == crop.shape and (mask == crop).all()]
    assert len(hits) == 1
    return hits[0]


@functools.cache
def cropped(text, tall):
    mask = np.asarray(text_mask(text, tall)) > 0
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return mask[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]


def pictures(kind, count):
    found = [one for i in range(15 * count) if (one := scene(11, i, "train")).kind == kind]
    assert len(found) >= count
    return [(one.content, draw(one)) for one in found[:count]]


def test_a_grid_can_be_read_back_from_its_pixels():
    names = {rgb: name for name, rgb in RGB.items()}
    for grid, image in pictures("grid", 10):
        cells = [(names.get(token(image, r, c).getpixel((16, 16))), written(token(image, r, c + 1)))
                 for r in range(6) for c in range(0, 6, 2)]
        assert [cell for cell in cells if cell[1]] == [
            (cell.colour, str(cell.number)) for cell in grid.cells]


def test_a_table_can_be_read_back_from_its_pixels():
    for table, image in pictures("table", 10):
        texts = [text for r in range(6) for c in range(6) if (text := written(token(image, r, c)))]
        rows = zip(table.rows, table.values, strict=True)
        assert texts == [*table.columns, *(str(x) for name, row in rows for x in (name, *row))]


def test_bars_can_be_read_back_from_their_pixels():
    for chart, image in pictures("bars", 10):
        columns = [[text for r in range(6) if (text := written(token(image, r, c)))]
                   for c in range(6)]
        assert [c for c in columns if c] == [[str(b.value), b.name] for b in chart.bars]
        heights = [int(ink(image, RGB[b.colour]).any(1).sum()) for b in chart.bars]
        assert heights == [b.value * 5 // 4 for b in chart.bars]


def test_lines_can_be_read_back_from_their_pixels():
    for chart, image in pictures("lines", 10):
        for column, values in ((0, [line.start for line in chart.lines]),
                               (5, [line.end for line in chart.lines])):
            texts = [text for r in range(6) if (text := written(token(image, r, column)))]
            assert texts == [str(v) for v in sorted(values, reverse=True)]
        for line in chart.lines:
            rows = np.flatnonzero(ink(image, RGB[line.colour])[:, SIZE - TOKEN - 1])
            assert abs(rows.mean() - line_height(line.end)) < 4


def test_a_line_s_value_lies_in_its_band():
    heights = [line_height(value) for value in range(LOWEST, HIGHEST + 1)]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == len(heights)
    assert all(line_height(v) // TOKEN == band(v) for v in range(LOWEST, HIGHEST + 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_fills_the_middle_of_its_token_and_stays_inside(shape):
    for look in range(30):
        grid = Grid(((Cell("red", shape, 47), Cell("blue", shape, 12), Cell("cyan", shape, 90)),))
        image = draw(Scene("grid", grid, look))
        marks = ink(image, RGB["blue"])
        top, left = (int(np.flatnonzero(marks.any(axis))[0]) // TOKEN * TOKEN for axis in (1, 0))
        assert marks[top:top + TOKEN, left:left + TOKEN].sum() == marks.sum() > 150
        assert image.getpixel((left + 16, top + 16)) == RGB["blue"] and left == 2 * TOKEN


def test_extreme_values_have_room():
    bars = tuple(Bar(n, c, v) for n, c, v in zip(
        "ABCDEF", RGB, (99, 10, 98, 11, 97, 12), strict=False))
    image = draw(Scene("bars", Bars(bars), 1))
    assert [written(token(image, 0, 0)), written(token(image, 3, 1))] == ["99", "10"]
    image = draw(Scene("lines", Lines((Line("red", 10, 99), Line("blue", 99, 10))), 1))
    assert [written(token(image, r, c)) for r, c in ((5, 0), (0, 5), (0, 0), (5, 5))] == [
        "10", "99", "99", "10"]


def test_a_story_has_no_picture():
    one = next(one for one in SAMPLES if one.scene.kind == "story")
    with pytest.raises(ValueError, match="kind 'story' has no picture"):
        draw(one.scene)
    assert [part["type"] for part in messages(one)[0]["content"]] == ["text"]


def test_the_processor_takes_pictures_as_they_are(chat):
    assert image_grid((SIZE, SIZE), chat.settings.image) == (1, 12, 12)
    one = next(one for one in SAMPLES if one.scene.has_picture)
    seen = example(one, chat)
    pads = (seen.prompt.ids == token_ids()["<|image_pad|>"]).sum()
    assert pads == (SIZE // TOKEN) ** 2 and len(seen.prompt.pictures) == 1
    back = (seen.prompt.pictures[0].patches.reshape(-1, 3, 2, 16, 16)[0, :, 0, 0, 0] + 1) * 127.5
    assert np.allclose(back, draw(one.scene).getpixel((0, 0)), atol=1e-3)


def test_without_its_picture_a_prompt_only_lacks_the_picture(chat):
    one = next(one for one in SAMPLES if one.scene.has_picture)
    seen, blind = example(one, chat), example(one, chat, with_picture=False)
    assert not blind.prompt.pictures and (seen.ids == blind.ids).all()
    ids = token_ids()
    vision = [ids[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end")]
    assert (seen.prompt.ids[~np.isin(seen.prompt.ids, vision)] == blind.prompt.ids).all()


def test_labels_cover_exactly_the_answer(chat):
    for one in SAMPLES[::4]:
        ids, labels = answer_tokens(one, chat.tokenizer)
        assert ids.shape == labels.shape and ids.dtype == np.int32 and labels.dtype == np.int8
        assert chat.tokenizer.decode(ids[:-1]) == one.text
        assert ids[-1] == token_ids()["<|im_end|>"] and labels[-1] == Label.TEMPLATE
        for label in Label:
            tokens = chat.tokenizer.decode(ids[labels == label])
            spans = "".join(span.text for span in one.answer if span.label == label)
            if label != Label.TEMPLATE:
                assert tokens.replace(" ", "") == spans.replace(" ", "")


def test_every_label_occurs(chat):
    kinds = collections.defaultdict(set)
    for one in SAMPLES[:400]:
        kinds[one.scene.kind] |= set(answer_tokens(one, chat.tokenizer)[1].tolist())
    for kind in KINDS:
        assert kinds[kind] == set(Label) - ({Label.VISUAL} if kind == "story" else set())


def test_a_token_with_two_labels_is_refused(chat):
    bad = dataclasses.replace(SAMPLES[0], answer=(Span("re"), Span("d", Label.VISUAL)))
    torn = dataclasses.replace(SAMPLES[0], answer=(Span(" re"), Span("d", Label.VISUAL)))
    answer_tokens(bad, chat.tokenizer)  # no word of the world at a beginning: spelt in bytes
    with pytest.raises(ValueError, match="the token 'red' has words of two labels"):
        answer_tokens(torn, chat.tokenizer)


def test_prompt_and_answer_are_the_ids_of_the_whole_text(chat):
    for one in SAMPLES[::40]:
        seen = example(one, chat, with_picture=False)
        whole = chat.render(messages(one, False)) + one.text + "<|im_end|>"
        assert chat.encode(whole) == [*seen.prompt.ids, *seen.ids]


def test_the_world_s_words_are_one_token_each(chat):
    """No wording is missing from the vocabulary: only letters, digits and marks are bytes."""
    assert 256 + len(words()) + len(SPECIAL) <= VOCABULARY
    for one in SAMPLES:
        tokens = chat.tokenizer.tokenize(one.question + "\n\n" + one.text)
        assert not [t for t in tokens if len(t) == 1 and t.islower() and t.isascii()]


@pytest.mark.parametrize("text", [
    "What is the number in row A?", "naïve café — 12 µm", "日本語 😀", "a\tb\r\n\n  c  ",
    "e\u0301"])
def test_any_text_comes_back(chat, text):
    back = chat.tokenizer.decode(chat.encode(text))
    assert back == text.replace("e\u0301", "\u00e9")  # NFC
    stream = chat.text_stream()
    deltas = [stream.feed([i]) for i in chat.encode(text)] + [stream.finish()]
    assert "".join(text for _, text in deltas) == back


@pytest.mark.parametrize("config", [None, '{"model_type": "qwen3_5"}'])
def test_transformers_loads_the_same_tokenizer(folder, chat, tmp_path, config):
    """Also beside a config.json of the family, whose own class would split and merge otherwise."""
    from transformers import AutoTokenizer

    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if config:
        (tmp_path / "config.json").write_text(config)
    auto = AutoTokenizer.from_pretrained(tmp_path)
    for one in SAMPLES[:40]:
        assert auto.encode(one.text) == chat.encode(one.text)
    assert auto.eos_token == "<|im_end|>" and auto.pad_token == "<|endoftext|>"
    asked = [{"role": "user", "content": "Hi"}]
    text = auto.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert text == chat.render(asked)


def test_reasoning_is_off_unless_asked_for(chat):
    asked = [{"role": "user", "content": "Hi"}]
    closed, opened = (chat.build_prompt(asked, reasoning=on) for on in (None, True))
    assert not closed.opens_reasoning and opened.opens_reasoning
    assert chat.render(asked, reasoning=False) == chat.render(asked)


def test_special_tokens_are_the_family_s_and_end_an_answer(chat):
    ids = token_ids()
    assert [*ids.values()] == list(range(ids["<|endoftext|>"], ids["<|mask|>"] + 1))
    assert set(chat.stop_ids) == {ids["<|im_end|>"], ids["<|endoftext|>"]}
    for name, i in ids.items():
        assert chat.encode(name) == [i]


def test_a_later_turn_keeps_the_turns_before(chat):
    first = [{"role": "user", "content": "Hi"}]
    turn = [*first, {"role": "assistant", "content": "The sum is 12."},
            {"role": "user", "content": "Why?"}]
    assert chat.render(turn).startswith(chat.render(first) + "The sum is 12.<|im_end|>\n")


def test_the_answer_of_a_text_is_the_last_one():
    assert world.final_answer("Final answer: 3.\nFinal answer: red circle.") == "red circle"
    assert world.final_answer("Final answer: C, A, B.") == "C, A, B"
    assert world.final_answer("no answer") is None


def test_text_mask_knows_only_what_scenes_write():
    assert text_mask("47", 14).size == (22, 14)
    assert isinstance(text_mask("A", 21), Image.Image)
    with pytest.raises(KeyError):
        text_mask("z", 14)
