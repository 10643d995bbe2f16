"""`python -m mmflash_jax.generate`: flags, streams, exit codes, and every kind of bad input.

Tests of flags and of bad input read no weights: `load` and `stream_prompt` are replaced. Answers
come from the tiny pair of `test_generate.py`, so that the compiled programs are the same.
"""

import base64
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmflash_jax import command_line
from mmflash_jax.command_line import main
from mmflash_jax.generate import Delta, Options, Result, generate, load, question
from tests.tiny import write_drafter, write_target

FIELDS = ["text", "reasoning", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason",
          "rounds", "acceptance_length", "acceptance_lengths", "prefill_s", "decode_s",
          "decode_tokens_per_s"]  # the interface that scripts read
TIMES = {"prefill_s", "decode_s", "decode_tokens_per_s"}
SUMMARY = r"acceptance length (\d\.\d\d|-), (\d+\.\d|-) tokens/s, \d+ rounds, \d+ tokens \(\w+\)"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a pair, a picture, frames, and things that are broken."""
    root = tmp_path_factory.mktemp("work")
    fields = write_target(root / "target", letters=3, layers=3, interval=3, mtp=False,
                          vision_depth=1)
    write_drafter(root / "draft", fields, layers=1, taps=(0, 1), architecture="MMFlashDraftModel")
    (root / "frames").mkdir()
    for i, colour in enumerate(("red", "green", "blue", "white")):
        Image.new("RGB", (64, 64), colour).save(root / "frames" / f"{i}.png")
    shutil.copy(root / "frames" / "0.png", root / "red.png")
    shutil.copy(root / "frames" / "2.png", root / "blue.png")
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 256, (64, 64, 3), np.uint8))
    noise.save(root / "noise.png")
    (root / "half.png").write_bytes((root / "noise.png").read_bytes()[:6000])
    (root / "page.png").write_text("<html>not a picture</html>")
    (root / "empty.png").touch()
    (root / "broken.json").write_text("[{")
    (root / "object.json").write_text("{}")
    (root / "none.json").write_text("[]")
    (root / "roleless.json").write_text('[{"content": "hello"}]')
    return root


@pytest.fixture(autouse=True)
def in_root(root, monkeypatch):
    monkeypatch.chdir(root)


@pytest.fixture(scope="module")
def pair(root):
    return load(str(root / "target"), str(root / "draft"), dtype="float32")


@pytest.fixture
def loaded(pair, monkeypatch):
    """Answers without loading and compiling again."""
    monkeypatch.setattr(command_line, "load", lambda *args, **kwargs: pair)


PAIR = ["--target", "target", "--draft", "draft", "--dtype", "float32"]
ASK = [*PAIR, "--prompt", "hello", "--max-new-tokens", "20"]


def same(got: dict, want: Result) -> None:
    assert list(got) == FIELDS
    want = json.loads(json.dumps(dataclasses.asdict(want)))
    assert {k: v for k, v in got.items() if k not in TIMES} == {
        k: v for k, v in want.items() if k not in TIMES}


# --- answers --------------------------------------------------------------------------------------

def test_a_process_of_its_own_prints_one_json_object(pair):
    """The main job, as a user starts it: weights from files, a picture, one object on stdout."""
    command = [sys.executable, "-m", "mmflash_jax.generate", *ASK, "--image", "red.png", "--json",
               "--frequency-penalty", "0.5"]
    here = str(Path(command_line.__file__).parents[1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8",
                          env={**os.environ, "PYTHONPATH": here})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("}\n") and done.stdout.count("\n") == 1
    same(json.loads(done.stdout), generate(pair, question("hello", ["red.png"]),
                                           Options(max_new_tokens=20, frequency_penalty=0.5)))
    lines = done.stderr.splitlines()
    assert re.fullmatch(SUMMARY, lines[-1])
    for what in ("loading drafter", "loading target", "compiling"):
        assert any(line.startswith(what) for line in lines), "no progress bar"
    shown = [line for line in lines if line.strip() and not re.match(r"loading|compiling", line)]
    assert shown == [  # R20, R40; and no library's warnings
        "drafter: block 16, taps [0, 1] of 3 layers, mask id 270, attention full", lines[-1]]


def test_the_target_alone_says_the_same(pair, capsys):
    """With --drafter none, from files: rounds are steps of one token."""
    want = generate(pair, question("hello"), Options(max_new_tokens=20))
    assert main(["--target", "target", "--drafter", "none", *ASK[4:], "--json"]) == 0
    out, err = capsys.readouterr()
    got = json.loads(out)
    same(got, dataclasses.replace(want, rounds=19, acceptance_length=1.0,
                                  acceptance_lengths=[1] * 19))
    assert "target alone, plain decoding" in err


def test_text_streams_with_thoughts_between_marks(loaded, pair, capsys):
    want = generate(pair, question("hello"), Options(max_new_tokens=20))
    assert main(ASK) == 0
    out, err = capsys.readouterr()
    assert out == f"<think>{want.reasoning}\n"
    assert re.fullmatch(SUMMARY, err.splitlines()[-1])
    assert main([*ASK, "--reasoning", "off"]) == 0
    out, _ = capsys.readouterr()
    assert out == generate(pair, question("hello"), Options(max_new_tokens=20),
                           reasoning=False).text + "\n"


def test_each_piece_is_written_as_it_comes(monkeypatch, capsys):
    result = Result("ab", "12", [1], 1, 1, "stop", 0, None, [], 0.1, 0.1, None)

    def pieces(*_, **__):
        for text, reasoning, said in (("", "1", "<think>1"), ("a", "2", "2</think>a"),
                                      ("b", "", "b")):
            yield Delta(text, reasoning, result if text == "b" else None)
            if text != "b":
                assert capsys.readouterr().out == said

    monkeypatch.setattr(command_line, "load", lambda *_, **__: None)
    monkeypatch.setattr(command_line, "_describe", lambda _: None)
    monkeypatch.setattr(command_line, "stream_prompt", pieces)
    assert main(ASK) == 0
    out, err = capsys.readouterr()
    assert out == "b\n" and err == "acceptance length -, - tokens/s, 0 rounds, 1 tokens (stop)\n"


def test_a_reader_that_goes_away_is_no_error(monkeypatch):
    def pieces(*_, **__):
        while True:
            yield Delta("x" * 10000, "")

    monkeypatch.setattr(command_line, "load", lambda *_, **__: None)
    monkeypatch.setattr(command_line, "_describe", lambda _: None)
    monkeypatch.setattr(command_line, "stream_prompt", pieces)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as gone, contextlib.redirect_stdout(gone):
        assert main(ASK) == 1


def test_interrupted(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "load", interrupt)
    assert main(ASK) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


# --- flags ----------------------------------------------------------------------------------------

@pytest.fixture
def asked(monkeypatch, capsys):
    """What a command line asks for, without an answer: -> prompt, options, limit, load's args."""
    def run(*argv: str):
        seen = {}

        def loads(*args, **kwargs):
            seen.update(load=(args, kwargs))

        def answers(pair, prompt, options, limit, report=None):
            seen.update(prompt=prompt, options=options, limit=limit)
            yield Delta("", "", Result("", None, [1], 1, 1, "stop", 0, None, [], 0.1, 0.1, None))

        monkeypatch.setattr(command_line, "load", loads)
        monkeypatch.setattr(command_line, "_describe", lambda _: None)
        monkeypatch.setattr(command_line, "stream_prompt", answers)
        try:
            code = main(list(argv))
        except SystemExit as end:
            code = end.code
        assert code == 0, capsys.readouterr().err
        capsys.readouterr()
        return seen

    return run


def text_of(asked: dict) -> str:
    chat = asked["load"][0][0]
    return chat.tokenizer.decode(asked["prompt"].ids)


def test_defaults(asked):
    seen = asked("--target", "target", "--draft", "draft", "--prompt", "hello")
    assert seen["options"] == Options(max_new_tokens=512)
    assert (seen["options"].temperature, seen["options"].top_p, seen["options"].top_k) == (0, 1, 0)
    assert seen["limit"] == 4096
    (chat, draft), kwargs = seen["load"]
    assert (chat.folder.name, draft) == ("target", "draft")
    assert kwargs.pop("report") and kwargs == {"drafter": "mmflash", "dtype": "bfloat16"}
    assert text_of(seen).endswith("<think>\n")  # the template's own default


def test_every_flag_of_the_answer(asked):
    seen = asked(*PAIR, "--prompt", "hello", "--max-new-tokens", "7", "--temperature", "0.5",
                 "--top-p", "0.9", "--top-k", "40", "--min-p", "0.05", "--presence-penalty", "1.5",
                 "--frequency-penalty", "-0.5", "--seed", "18446744073709551615", "--ignore-eos",
                 "--stop", "one", "--stop", "two words", "--context-length", "300",
                 "--drafter", "dflash", "--json")
    assert seen["options"] == Options(
        max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, presence_penalty=1.5,
        frequency_penalty=-0.5, seed=2**64 - 1, ignore_eos=True, stop=("one", "two words"),
        context_length=300)
    assert seen["limit"] == 300
    assert seen["load"][1]["drafter"] == "dflash" and seen["load"][1]["dtype"] == "float32"


@pytest.mark.parametrize("drafter", [[], ["--drafter", "none"]])
def test_without_a_drafter(asked, drafter):
    """`--draft DIR` and `--drafter none` are both optional: without either, the target alone."""
    seen = asked("--target", "target", "--prompt", "hello", *drafter)
    assert seen["load"][0][1] is None


def test_sampling_of_the_checkpoint(asked):
    """generation_config.json says temperature 1, top-k 20, top-p 0.95; flags are stronger."""
    seen = asked(*ASK, "--sampling", "checkpoint")
    assert seen["options"] == Options(max_new_tokens=20, temperature=1.0, top_k=20, top_p=0.95)
    seen = asked(*ASK, "--sampling", "checkpoint", "--temperature", "0", "--top-k", "5",
                 "--min-p", "0.1")
    assert seen["options"] == Options(max_new_tokens=20, top_k=5, top_p=0.95, min_p=0.1)


def test_reasoning_and_arguments_of_the_template(asked):
    off = text_of(asked(*ASK, "--reasoning", "off"))
    assert off.endswith("<think>\n\n</think>\n\n")
    assert text_of(asked(*ASK, "--reasoning", "on")) == text_of(asked(*ASK))
    assert text_of(asked(*ASK, "--chat-template-kwargs", '{"enable_thinking": false}')) == off
    numbered = asked(*ASK, "--image", "red.png", "--chat-template-kwargs",
                     '{"add_vision_id": true}')
    assert "Picture 1: <|vision_start|>" in text_of(numbered)


def test_pictures_first_then_the_video_then_the_text(asked):
    """R30: in --image order, wherever the flags stand."""
    seen = asked("--prompt", "what?", "--video", "frames", "--image", "red.png", *PAIR,
                 "--image", "blue.png")
    text = text_of(seen)
    assert re.search(r"(<\|image_pad\|>)+.*(<\|image_pad\|>)+.*(<\|video_pad\|>)+.*what\?", text)
    red, blue, video = seen["prompt"].pictures
    assert red.grid[0] == blue.grid[0] == 1 and video.grid[0] == 2
    first, second = (p.patches.reshape(-1, 3, 512)[0, :, 0] for p in (red, blue))
    assert first.tolist() == [1, -1, -1] and second.tolist() == [-1, -1, 1]


def test_messages_of_a_file(asked, tmp_path):
    """R30: text and pictures interleaved, a data: URL among them, several turns."""
    url = "data:image/png;base64," + base64.b64encode(Path("blue.png").read_bytes()).decode()
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "first"},
            {"type": "image_url", "image_url": {"url": "red.png"}},
            {"type": "text", "text": "second"},
            {"type": "image_url", "image_url": {"url": url}}]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "sûr?"}]), encoding="utf-8")
    seen = asked(*PAIR, "--messages", str(file))
    order = ("system\nBe brief.", "first<|vision_start|>", "second<|vision_start|>", "Two.", "sûr?")
    places = [text_of(seen).index(piece) for piece in order]
    assert places == sorted(places) and len(seen["prompt"].pictures) == 2


def test_sizes_of_pictures(asked):
    def tokens(*limits: str) -> int:
        return len(asked(*ASK, "--image", "red.png", *limits)["prompt"].ids)

    assert tokens("--min-pixels", "9216") - tokens("--max-pixels", "4096") == 9 - 4


def test_an_image_as_data_url(asked):
    url = "data:image/png;base64," + base64.b64encode(Path("noise.png").read_bytes()).decode()
    given, named = (asked(*ASK, "--image", source)["prompt"] for source in (url, "noise.png"))
    np.testing.assert_array_equal(given.pictures[0].patches, named.pictures[0].patches)


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    out, err = capsys.readouterr()
    assert end.value.code == 0 and not err
    flags = ("--target --draft --drafter --dtype --prompt --image --video --messages --min-pixels "
             "--max-pixels --reasoning --chat-template-kwargs --max-new-tokens --context-length "
             "--temperature --top-p --top-k --min-p --presence-penalty --frequency-penalty "
             "--sampling --seed --stop --ignore-eos --json").split()
    for flag in flags:
        assert re.search(rf"^  {flag} .*\S|^  {flag}\n +\S", out, re.M), f"no word on {flag}"
    assert "default: 512" in out and "mmflash" in out
    assert out.count("python -m mmflash_jax.generate --target") == 2, "no examples"


# --- bad input ------------------------------------------------------------------------------------

BAD = {  # name: (arguments, what the line says)
    "no target": (["--prompt", "x"], "required: --target"),
    "unknown flag": ([*ASK, "--tempo", "1"], "unrecognized arguments: --tempo 1"),
    "flag cut short": ([*ASK, "--temp", "1"], "unrecognized arguments: --temp"),
    "words left over": ([*PAIR, "--prompt", "two", "words\nlines"], "unrecognized arguments"),
    "dtype": ([*ASK, "--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
    "drafter's name": ([*ASK, "--drafter", "eagle9"], "--drafter: invalid choice: 'eagle9'.*dfl"),
    "reasoning": ([*ASK, "--reasoning", "maybe"], "--reasoning: invalid choice: 'maybe'"),
    "sampling": ([*ASK, "--sampling", "mine"], "--sampling: invalid choice: 'mine'"),
    "draft and none": ([*ASK, "--drafter", "none"], "--draft names a drafter, but --drafter is"),
    "drafter without draft": (["--target", "target", "--prompt", "x", "--drafter", "mmflash"],
                              "--drafter mmflash needs .* --draft DIR"),
    "no question": (PAIR, "give a question with --prompt TEXT"),
    "empty prompt": ([*PAIR, "--prompt", ""], "--prompt is empty"),
    "blank prompt": ([*PAIR, "--prompt", " \n", "--image", "red.png"], "--prompt is empty"),
    "prompt and messages": ([*ASK, "--messages", "none.json"], "--messages holds the whole"),
    "image and messages": ([*PAIR, "--messages", "none.json", "--image", "red.png"],
                           "--messages holds the whole"),
    "not unicode": ([*PAIR, "--prompt", "a\udcffb"], "not valid Unicode"),
    "pad as text": ([*PAIR, "--prompt", "<|image_pad|>"], "contains the text <.image_pad.>"),
    # files
    "no image": ([*ASK, "--image", "nowhere.png"], "nowhere.png: no such file"),
    "folder as image": ([*ASK, "--image", "frames"], "frames: a folder, expected a file"),
    "empty name": ([*ASK, "--image", ""], "a folder, expected a file"),
    "truncated image": ([*ASK, "--image", "half.png"], "half.png: broken picture"),
    "page as image": ([*ASK, "--image", "page.png"], "page.png: not a JPEG, PNG"),
    "empty image": ([*ASK, "--image", "red.png", "--image", "empty.png"], "empty.png: "),
    "address": ([*ASK, "--image", "https://host/a.png"], "https addresses are not fetched"),
    "long name": ([*ASK, "--image", "x" * 5000], "name too long"),
    "broken data URL": ([*ASK, "--image", "data:image/png;base64,AA"], "data: URL"),
    "no video": ([*ASK, "--video", "nowhere.mp4"], "nowhere.mp4: no such file"),
    "text as video": ([*ASK, "--video", "page.png"], "page.png: "),
    "no messages": ([*PAIR, "--messages", "nowhere.json"], "nowhere.json: no such file"),
    "broken messages": ([*PAIR, "--messages", "broken.json"], "broken.json: not a readable JSON"),
    "picture as messages": ([*PAIR, "--messages", "red.png"], "red.png: not a readable JSON"),
    "folder as messages": ([*PAIR, "--messages", "frames"], "frames: not a readable JSON"),
    "object as messages": ([*PAIR, "--messages", "object.json"], "expected a JSON list, found d"),
    "messages of nothing": ([*PAIR, "--messages", "none.json"], "at least one message"),
    "message without role": ([*PAIR, "--messages", "roleless.json"], r"messages\[0\].*role"),
    # numbers
    "temperature nan": ([*ASK, "--temperature", "nan"], "temperature is nan, expected a number"),
    "temperature inf": ([*ASK, "--temperature", "inf"], "temperature is inf, expected a number"),
    "temperature -1": ([*ASK, "--temperature", "-1"], "temperature is -1.0"),
    "temperature word": ([*ASK, "--temperature", "hot"], "--temperature: invalid float value"),
    "top-p 0": ([*ASK, "--top-p", "0"], "top_p is 0"),
    "top-p 2": ([*ASK, "--top-p", "2"], "top_p is 2.0, expected a number from 0 to 1"),
    "top-k -1": ([*ASK, "--top-k", "-1"], "top_k is -1, expected a whole number from 0"),
    "top-k 1.5": ([*ASK, "--top-k", "1.5"], "--top-k: invalid int value"),
    "min-p 1.5": ([*ASK, "--min-p", "1.5"], "min_p is 1.5"),
    "presence 3": ([*ASK, "--presence-penalty", "3"], "presence_penalty is 3.0"),
    "frequency nan": ([*ASK, "--frequency-penalty", "nan"], "frequency_penalty is nan"),
    "seed -1": ([*ASK, "--seed", "-1"], "seed is -1"),
    "no tokens": ([*ASK, "--max-new-tokens", "0"], "max_new_tokens is 0"),
    "negative tokens": ([*ASK, "--max-new-tokens", "-5"], "max_new_tokens is -5"),
    "no context": ([*ASK, "--context-length", "0"], "context_length is 0"),
    "much context": ([*ASK, "--context-length", "4097"], "is 4097, .* 4096"),
    "empty stop": ([*ASK, "--stop", ""], "stop is an empty text"),
    "few pixels": ([*ASK, "--image", "red.png", "--max-pixels", "1"], "max_pixels is 1, expected"),
    "negative pixels": ([*ASK, "--image", "red.png", "--min-pixels", "-1"], "min_pixels is -1"),
    "crossed pixels": ([*ASK, "--image", "red.png", "--min-pixels", "9216", "--max-pixels",
                        "4096"], "min_pixels is 9216, above max_pixels 4096"),
    "pixels of nothing": ([*ASK, "--min-pixels", "4096"], "bound pictures, but there is none"),
    # the prompt's length (R46, R47)
    "prompt over limit": ([*ASK, "--context-length", "10"], r"needs \d+ tokens .* at most 9 are"),
    "image over limit": ([*ASK, "--image", "red.png", "--context-length", "4"],
                         "needs more than 4 tokens .4 of pictures., at most 3"),
    # arguments of the template
    "kwargs no JSON": ([*ASK, "--chat-template-kwargs", "{'a': 1}"], "kwargs: not JSON"),
    "kwargs a list": ([*ASK, "--chat-template-kwargs", "[1]"], "expected a JSON object"),
    "kwargs unknown": ([*ASK, "--chat-template-kwargs", '{"enable_thought": 1}'],
                       "knows no 'enable_thought'"),
    "kwargs of ours": ([*ASK, "--chat-template-kwargs", '{"context_length": 5}'],
                       "'context_length' cannot be set here"),
    "kwargs of HF": ([*ASK, "--chat-template-kwargs", '{"tokenize": true}'], "'tokenize' cannot"),
    "kwargs at odds": ([*ASK, "--reasoning", "on", "--chat-template-kwargs",
                        '{"enable_thinking": false}'], "reasoning is on, but .* False"),
    # checkpoints
    "no such target": (["--target", "nowhere", *ASK[2:]], "nowhere: no such folder"),
    "file as target": (["--target", "red.png", *ASK[2:]], "red.png: is a file, expected a model"),
    "no target's config": (["--target", "frames", *ASK[2:]], "config.json: no such file"),
    "draft as target": (["--target", "draft", *ASK[2:]], "expected Qwen3_5ForConditionalGen"),
}


def refused(argv: list[str], message: str, capsys) -> None:
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert len(err.splitlines()) == 1 and err.startswith("error: ") and err.endswith("\n"), err
    assert re.search(message, err), err


@pytest.mark.parametrize("argv, message", BAD.values(), ids=BAD)
def test_bad_input_exits_2_with_one_line_before_weights(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "load", lambda *_, **__: pytest.fail("weights were read"))
    refused(argv, message, capsys)


def test_sampling_that_the_checkpoint_cannot_say(root, tmp_path, capsys):
    target = shutil.copytree(root / "target", tmp_path / "target")
    argv = ["--target", str(target), *ASK[2:], "--sampling", "checkpoint"]
    path = target / "generation_config.json"
    path.write_text('{"repetition_penalty": 1.1}')
    refused(argv, "repetition_penalty is 1.1, which is not supported", capsys)
    path.write_text('{"top_p": 7}')
    refused(argv, "top_p is 7, expected a number from 0 to 1", capsys)
    path.unlink()
    refused(argv, "generation_config.json: no such file", capsys)


def test_checkpoints_that_cannot_be_loaded(root, tmp_path, capsys):
    """R40 and broken files, through the real loader: no bar is drawn before the one line."""
    refused([*ASK[:2], "--draft", "nowhere", *ASK[4:]], "nowhere: no such folder", capsys)
    refused([*ASK[:2], "--draft", "target", *ASK[4:]], "expected one of .*MMFlashDraft", capsys)
    draft = shutil.copytree(root / "draft", tmp_path / "draft")
    fields = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**fields, "hidden_size": 64}))
    refused([*ASK[:2], "--draft", str(draft), *ASK[4:]],
            "no pair: the drafter's hidden_size is 64, the target's is 56", capsys)
    target = shutil.copytree(root / "target", tmp_path / "target")
    shard = next(target.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-16])
    refused(["--target", str(target), *ASK[2:]], shard.name, capsys)
    (target / "tokenizer.json").unlink()
    refused(["--target", str(target), *ASK[2:]], "tokenizer.json: no such file", capsys)
