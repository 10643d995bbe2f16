"""Questions about the scenes of a small world, and answers whose words are labelled.

In: a seed, an index, a split; the three alone give one `Sample`, on any machine.
Out: a question and an answer in `Span`s, each labelled by where its words come from. An answer
says what is seen, works out what was asked, and ends with `Final answer: X.`
This file knows nothing of pixels (`world_draw.py`), tokens (`world_tokenizer.py`) or models. It is
long because every kind of scene has its description and its tasks, a dozen lines each.
"""

import dataclasses
import enum
import random
import re
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mmflash_jax.train.world_scenes import (
    COLOURS,
    SHAPES,
    Bars,
    Grid,
    Lines,
    Scene,
    Story,
    Table,
    scene,
)

QUESTIONS = 4  # samples of one scene, each of another task
FINAL = re.compile(r"Final answer: ([^.\n]+)\.")


class Label(enum.IntEnum):
    """Where the words of an answer come from."""

    TEMPLATE = 0  # what any scene of the kind, or any answer to the question, would have here
    VISUAL = 1  # read from the picture: the description, which comes first
    COPIED = 2  # said before, in the description, a step or the question, and only repeated
    DERIVED = 3  # computed, or chosen by comparing or sorting, from what was said before


@dataclasses.dataclass(frozen=True)
class Span:
    text: str
    label: Label = Label.TEMPLATE


@dataclasses.dataclass(frozen=True)
class Sample:
    scene: Scene
    asked: tuple[str, ...]  # the task and what the question names
    question: str
    answer: tuple[Span, ...]
    final: str

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(span.text for span in self.answer)


def sample(seed: int, index: int, split: str) -> Sample:
    """The sample of this number: scene `index // QUESTIONS`, its tasks in an order of its own.
    Raises ValueError as `scene` does."""
    number, turn = divmod(index, QUESTIONS)
    about = scene(seed, number, split)
    order = random.Random(f"tasks {seed} {split} {number}").sample(TASKS[about.kind], QUESTIONS)
    rng = random.Random(f"sample {seed} {split} {index}")
    out = _Answer(rng)
    describe, content = _DESCRIPTIONS[about.kind], about.content
    describe(content, out)
    asked, question, final = order[turn](content, rng, out)
    out.say("I have checked each step again and found nothing to change, so this is what I give.",
            "Each step follows from the one before, so nothing more has to be done here.",
            "That is all the question asks for, so I can give my answer now.")
    out.say("Final answer: {final}.", final=_again(final))
    return Sample(about, asked, question, tuple(out.spans), final)


def final_answer(text: str) -> str | None:
    """What an answer, the project's or a model's, gives as its last final answer."""
    found = FINAL.findall(text)
    return found[-1] if found else None


class _Answer:
    """Collects an answer sentence by sentence, each in one of the wordings given for it."""

    def __init__(self, rng: random.Random):
        self.spans: list[Span] = []
        self._rng = rng

    def say(self, *wordings: str, **slots: Span | Sequence[Span]) -> None:
        """Add a sentence; a wording starts a new line unless it starts with a space."""
        wording = self._rng.choice(wordings)
        if self.spans and not wording.startswith(" "):
            self.spans.append(Span("\n"))
        for text, name, _, _ in string.Formatter().parse(wording):
            if text:
                self.spans.append(Span(text))
            if name:
                found = slots[name]
                self.spans.extend([found] if isinstance(found, Span) else found)


def _seen(value: object) -> Span:
    return Span(str(value), Label.VISUAL)


def _again(value: object) -> Span:
    return Span(str(value), Label.COPIED)


def _new(value: object) -> Span:
    return Span(str(value), Label.DERIVED)


def _listed(spans: Iterable[Span]) -> list[Span]:
    joined = [part for span in spans for part in (Span(", "), span)]
    return joined[1:]


def _describe_grid(grid: Grid, out: _Answer) -> None:
    out.say("The picture shows a grid of shapes with {n} rows.", "I see a grid that has {n} rows.",
            "This is a grid of shapes and numbers in {n} rows.", n=_seen(len(grid.rows)))
    for i, row in enumerate(grid.rows):
        cells = _listed(_seen(f"{cell.name} {cell.number}") for cell in row)
        out.say(f"Row {i + 1}: {{cells}}.", cells=cells)


def _describe_bars(chart: Bars, out: _Answer) -> None:
    out.say("The picture shows a bar chart with {n} bars.", "I see a chart that has {n} bars.",
            "This is a bar chart of {n} bars.", n=_seen(len(chart.bars)))
    for bar in chart.bars:
        out.say(" Bar {name} is {colour} and has the value {value}.", name=_seen(bar.name),
                colour=_seen(bar.colour), value=_seen(bar.value))


def _describe_table(table: Table, out: _Answer) -> None:
    out.say("The picture shows a table with the columns {names}.",
            "I see a table that has the columns {names}.",
            "This is a table of numbers in the columns {names}.",
            names=_listed(map(_seen, table.columns)))
    for name, row in zip(table.rows, table.values, strict=True):
        out.say("Row {name}: {row}.", name=_seen(name), row=_listed(map(_seen, row)))


def _describe_lines(chart: Lines, out: _Answer) -> None:
    out.say("The picture shows a line chart with {n} lines.", "I see a chart that has {n} lines.",
            "This is a line chart of {n} lines.", n=_seen(len(chart.lines)))
    for line in chart.lines:
        out.say(" The {colour} line starts at {start} and ends at {end}.",
                colour=_seen(line.colour), start=_seen(line.start), end=_seen(line.end))


def _describe_story(story: Story, out: _Answer) -> None:
    out.say("There is no picture to look at, so I use the text.",
            "I read the numbers in the text.", "All numbers stand in the text.")
    for person, number in zip(story.people, story.numbers, strict=True):
        out.say(" {person} has {number} {thing}.", person=_again(person), number=_again(number),
                thing=_again(story.thing))


_DESCRIPTIONS: dict[str, Callable[[Any, _Answer], None]] = {
    "grid": _describe_grid, "bars": _describe_bars, "table": _describe_table,
    "lines": _describe_lines, "story": _describe_story}

# A task writes its reasoning and returns (asked, question, final). Its content is of its kind.
Asked = tuple[tuple[str, ...], str, str]
Task = Callable[[Any, random.Random, _Answer], Asked]


def _read(out: _Answer, of: Sequence[Span], value: int) -> None:
    out.say("To answer this, I look for the right place and read the number there.",
            "The question asks for one number, which I can read.",
            "I only have to find the place and read its number.")
    out.say(" The number of {of} is {value}.", " For {of} it is {value}.",
            " There, {of} has {value}.", of=of, value=_again(value))


def _add(out: _Answer, numbers: Sequence[int]) -> str:
    out.say("To get the sum, I add the numbers one after another.",
            "The question asks for a sum, so I add the numbers.",
            "I add these numbers step by step.")
    total, steps = numbers[0], []
    for i, number in enumerate(numbers[1:]):
        steps += [Span(", " if i else ""), _again(total), Span(" + "), _again(number), Span(" = ")]
        total += number
        steps.append(_new(total))
    out.say(" {steps}.", steps=steps)
    return str(total)


def _subtract(out: _Answer, one: int, two: int) -> str:
    high, low = max(one, two), min(one, two)
    out.say("To get the difference, I take the smaller number from the larger one.",
            "The question asks for a difference, so I subtract the smaller number.",
            "I compare the two numbers and subtract the smaller one.")
    out.say(" {high} - {low} = {rest}.", high=_new(high), low=_new(low), rest=_new(high - low))
    return str(high - low)


def _choose(out: _Answer, names: Sequence[str], values: Sequence[int], most: bool) -> str:
    word = "largest" if most else "smallest"
    best = (max if most else min)(values)
    name = names[values.index(best)]
    out.say(f"To find the {word} number, I compare all of them:",
            f"The question asks for the {word} number, so I list them:",
            f"I go through the numbers and keep the {word} one:")
    out.say(" {values}.", values=_listed(map(_again, values)))
    out.say(f" The {word} is {{best}}, and it belongs to {{name}}.",
            f" So {{best}} is the {word}, which belongs to {{name}}.",
            f" Here {{best}} is the {word}, so it is {{name}}.", best=_new(best), name=_new(name))
    return name


def _count(out: _Answer, found: Sequence[str]) -> str:
    out.say("To count them, I go through the picture and list each one:",
            "The question asks for a count, so I list them first:",
            "I list all that fit and count them:")
    listed = _listed(map(_new, found)) if found else [_new("none")]
    out.say(" {found}. That makes {n}.", " {found}. The count is {n}.", " {found}. So it is {n}.",
            found=listed, n=_new(len(found)))
    return str(len(found))


def _order(out: _Answer, names: Sequence[str], values: Sequence[int]) -> str:
    pairs = sorted(zip(values, names, strict=True))
    out.say("To put them in order, I start with the smallest number.",
            "The question asks for an order, so I sort the numbers.",
            "I sort the numbers from low to high.")
    out.say(" They are {pairs}.", " In order: {pairs}.", " That gives {pairs}.",
            pairs=_listed(_new(f"{name} {value}") for value, name in pairs))
    return ", ".join(name for _, name in pairs)


def _grid_number(grid: Grid, rng: random.Random, out: _Answer) -> Asked:
    cell = rng.choice(grid.cells)
    question = rng.choice((f"What is the number of the {cell.name}?",
                           f"Which number stands next to the {cell.name}?",
                           f"Read the number of the {cell.name}."))
    _read(out, [Span("the "), _again(cell.name)], cell.number)
    return ("number", cell.name), question, str(cell.number)


def _grid_colour(grid: Grid, rng: random.Random, out: _Answer) -> Asked:
    colour = rng.choice([rng.choice(grid.cells).colour] * 3 + [rng.choice(COLOURS)])
    question = rng.choice((f"How many {colour} shapes are there?", f"Count the {colour} shapes.",
                           f"What is the count of the {colour} shapes?"))
    final = _count(out, [cell.name for cell in grid.cells if cell.colour == colour])
    return ("count colour", colour), question, final


def _grid_shape(grid: Grid, rng: random.Random, out: _Answer) -> Asked:
    shape = rng.choice(list(SHAPES))
    question = rng.choice((f"How many {SHAPES[shape]} are there?", f"Count the {SHAPES[shape]}.",
                           f"What is the count of the {SHAPES[shape]}?"))
    final = _count(out, [cell.name for cell in grid.cells if cell.shape == shape])
    return ("count shape", shape), question, final


def _grid_row(grid: Grid, rng: random.Random, out: _Answer) -> Asked:
    row = rng.randrange(len(grid.rows))
    question = rng.choice((f"What is the sum of the numbers in row {row + 1}?",
                           f"Add the numbers in row {row + 1}.",
                           f"How much is row {row + 1} in sum?"))
    final = _add(out, [cell.number for cell in grid.rows[row]])
    return ("sum of row", str(row + 1)), question, final


def _grid_extreme(grid: Grid, rng: random.Random, out: _Answer) -> Asked:
    word = rng.choice(("largest", "smallest"))
    question = rng.choice((f"Which shape has the {word} number?", f"Find the {word} number.",
                           f"What belongs to the {word} number?"))
    final = _choose(out, [cell.name for cell in grid.cells], [c.number for c in grid.cells],
                    word == "largest")
    return (word,), question, final


def _bar_value(chart: Bars, rng: random.Random, out: _Answer) -> Asked:
    bar = rng.choice(chart.bars)
    question = rng.choice((f"What is the value of bar {bar.name}?", f"How high is bar {bar.name}?",
                           f"Read the value of bar {bar.name}."))
    _read(out, [Span("bar "), _again(bar.name)], bar.value)
    return ("value", bar.name), question, str(bar.value)


def _bar_colour(chart: Bars, rng: random.Random, out: _Answer) -> Asked:
    bar = rng.choice(chart.bars)
    question = rng.choice((f"What is the value of the {bar.colour} bar?",
                           f"How high is the {bar.colour} bar?",
                           f"Read the value of the {bar.colour} bar."))
    _read(out, [Span("the "), _again(bar.colour), Span(" bar")], bar.value)
    return ("value of colour", bar.colour), question, str(bar.value)


def _bar_pair(chart: Bars, rng: random.Random, out: _Answer) -> Asked:
    task = rng.choice(("sum", "difference"))
    one, two = rng.sample(chart.bars, 2)
    question = rng.choice((f"What is the {task} of bar {one.name} and bar {two.name}?",
                           f"Find the {task} of bar {one.name} and bar {two.name}.",
                           f"How much is the {task} of bar {one.name} and bar {two.name}?"))
    if task == "sum":
        return (task, one.name, two.name), question, _add(out, [one.value, two.value])
    return (task, one.name, two.name), question, _subtract(out, one.value, two.value)


def _bar_higher(chart: Bars, rng: random.Random, out: _Answer) -> Asked:
    pair = rng.sample(chart.bars, 2)
    one, two = (bar.name for bar in pair)
    question = rng.choice((f"Which is higher, bar {one} or bar {two}?",
                           f"Compare bar {one} and bar {two}. Which is higher?",
                           f"Find the higher bar of {one} and {two}."))
    return ("higher", one, two), question, _choose(out, [one, two], [b.value for b in pair], True)


def _bar_order(chart: Bars, rng: random.Random, out: _Answer) -> Asked:
    question = rng.choice(("List the bars from low to high.", "Sort the bars from low to high.",
                           "What is the order of the bars from low to high?"))
    final = _order(out, [bar.name for bar in chart.bars], [bar.value for bar in chart.bars])
    return ("order",), question, final


def _table_value(table: Table, rng: random.Random, out: _Answer) -> Asked:
    row, column = rng.randrange(3), rng.randrange(3)
    place = f"row {table.rows[row]} and column {table.columns[column]}"
    question = rng.choice((f"What is the number in {place}?", f"Read the number in {place}.",
                           f"Which number stands in {place}?"))
    _read(out, [Span("row "), _again(table.rows[row]), Span(" and column "),
                _again(table.columns[column])], table.values[row][column])
    asked = ("entry", table.rows[row], table.columns[column])
    return asked, question, str(table.values[row][column])


def _table_sum(table: Table, rng: random.Random, out: _Answer) -> Asked:
    what, i = rng.choice(("row", "column")), rng.randrange(3)
    name = table.rows[i] if what == "row" else table.columns[i]
    values = table.values[i] if what == "row" else [row[i] for row in table.values]
    question = rng.choice((f"What is the sum of {what} {name}?", f"Add the numbers in {what} "
                           f"{name}.", f"How much is {what} {name} in sum?"))
    return (f"sum of {what}", name), question, _add(out, values)


def _table_extreme(table: Table, rng: random.Random, out: _Answer) -> Asked:
    word, i = rng.choice(("largest", "smallest")), rng.randrange(3)
    name = table.rows[i]
    question = rng.choice((f"Which column has the {word} number in row {name}?",
                           f"Find the column of the {word} number in row {name}.",
                           f"What column belongs to the {word} number in row {name}?"))
    final = _choose(out, table.columns, table.values[i], word == "largest")
    return (word, name), question, final


def _table_difference(table: Table, rng: random.Random, out: _Answer) -> Asked:
    row = rng.randrange(3)
    one, two = rng.sample(range(3), 2)
    names = f"{table.columns[one]} and {table.columns[two]}"
    question = rng.choice((f"What is the difference of {names} in row {table.rows[row]}?",
                           f"Find the difference of {names} in row {table.rows[row]}.",
                           f"In row {table.rows[row]}, how much is the difference of {names}?"))
    final = _subtract(out, table.values[row][one], table.values[row][two])
    return ("difference", table.rows[row], table.columns[one], table.columns[two]), question, final


def _line_end(chart: Lines, rng: random.Random, out: _Answer) -> Asked:
    line, what = rng.choice(chart.lines), rng.choice(("start", "end"))
    question = rng.choice((f"What is the {what} of the {line.colour} line?",
                           f"Read the {what} of the {line.colour} line.",
                           f"At which number is the {what} of the {line.colour} line?"))
    value = line.start if what == "start" else line.end
    _read(out, [Span(f"the {what} of the "), _again(line.colour), Span(" line")], value)
    return (what, line.colour), question, str(value)


def _line_turn(chart: Lines, rng: random.Random, out: _Answer) -> Asked:
    line = rng.choice(chart.lines)
    question = rng.choice((f"Does the {line.colour} line rise or fall?",
                           f"Is the {line.colour} line going up or down? Say rise or fall.",
                           f"Which is right for the {line.colour} line, rise or fall?"))
    final = "rise" if line.end > line.start else "fall"
    out.say("To see this, I compare the start and the end of the line.",
            "The question asks for a direction, so I compare both ends.",
            "I look at both ends of this line.")
    out.say(" It goes from {start} to {end}, which is a {turn}.",
            " From {start} to {end} it is a {turn}.", " The way from {start} to {end} is a {turn}.",
            start=_again(line.start), end=_again(line.end), turn=_new(final))
    return ("turn", line.colour), question, final


def _line_change(chart: Lines, rng: random.Random, out: _Answer) -> Asked:
    line = rng.choice(chart.lines)
    question = rng.choice((f"What is the difference of start and end of the {line.colour} line?",
                           f"How much does the {line.colour} line change?",
                           f"Find the change of the {line.colour} line."))
    return ("change", line.colour), question, _subtract(out, line.start, line.end)


def _line_extreme(chart: Lines, rng: random.Random, out: _Answer) -> Asked:
    word, what = rng.choice(("largest", "smallest")), rng.choice(("start", "end"))
    question = rng.choice((f"Which line has the {word} {what}?", f"Find the line of the {word} "
                           f"{what}.", f"What line belongs to the {word} {what}?"))
    values = [line.start if what == "start" else line.end for line in chart.lines]
    final = _choose(out, [line.colour for line in chart.lines], values, word == "largest")
    return (word, what), question, final


def _tell(story: Story, end: str) -> str:
    told = zip(story.people, story.numbers, strict=True)
    return " ".join([*(f"{who} has {number} {story.thing}." for who, number in told), end])


def _story_sum(story: Story, rng: random.Random, out: _Answer) -> Asked:
    end = rng.choice((f"How many {story.thing} are there in sum?",
                      f"What is the sum of the {story.thing}?", f"Add the {story.thing}."))
    return ("sum",), _tell(story, end), _add(out, story.numbers)


def _story_difference(story: Story, rng: random.Random, out: _Answer) -> Asked:
    end = rng.choice(("What is the difference?", "How much is the difference?",
                      "Find the difference."))
    return ("difference",), _tell(story, end), _subtract(out, *story.numbers)


def _story_most(story: Story, rng: random.Random, out: _Answer) -> Asked:
    end = rng.choice((f"Who has more {story.thing}?", "Who has the largest number?",
                      "Find who has more."))
    return ("largest",), _tell(story, end), _choose(out, story.people, story.numbers, True)


def _story_least(story: Story, rng: random.Random, out: _Answer) -> Asked:
    end = rng.choice((f"Who has less {story.thing}?", "Who has the smallest number?",
                      "Find who has less."))
    return ("smallest",), _tell(story, end), _choose(out, story.people, story.numbers, False)


TASKS: dict[str, list[Task]] = {
    "grid": [_grid_number, _grid_colour, _grid_shape, _grid_row, _grid_extreme],
    "bars": [_bar_value, _bar_colour, _bar_pair, _bar_higher, _bar_order],
    "table": [_table_value, _table_sum, _table_extreme, _table_difference],
    "lines": [_line_end, _line_turn, _line_change, _line_extreme],
    "story": [_story_sum, _story_difference, _story_most, _story_least],
}
