"""Scenes of the small world: what a picture shows, or a story without one.

In: a seed, an index, a split. Out: `Scene`; the three alone give it, on any machine. A digest of
a scene's content decides its split, so no seed can put one content into both.
This file knows nothing of questions (`world.py`) or pixels (`world_draw.py`).
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable
from typing import Any

SPLITS = ("train", "held-out")
KINDS = ("grid", "bars", "table", "lines", "story")  # equally often; a story has no picture
HELD_OUT = 8  # one scene of so many is held out

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "black")
SHAPES = {"circle": "circles", "square": "squares", "triangle": "triangles",
          "diamond": "diamonds", "cross": "crosses"}  # singular -> plural
NAMES = "ABCDEF"  # of bars and table rows
COLUMNS = "KLMNPT"  # of table columns
LOWEST, HIGHEST = 10, 99  # every number has two digits
PEOPLE = ("Tom", "Ann", "Sam", "Eva", "Max", "Lea")
THINGS = ("apples", "books", "coins", "pens")


@dataclasses.dataclass(frozen=True)
class Cell:
    colour: str
    shape: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Grid:
    rows: tuple[tuple[Cell, ...], ...]  # 2 to 4 rows of 3; no two cells share colour and shape

    @property
    def cells(self) -> list[Cell]:
        return [cell for row in self.rows for cell in row]


@dataclasses.dataclass(frozen=True)
class Bar:
    name: str
    colour: str
    value: int


@dataclasses.dataclass(frozen=True)
class Bars:
    bars: tuple[Bar, ...]  # 3 to 6 from left to right; names, colours and values all differ


@dataclasses.dataclass(frozen=True)
class Table:
    rows: str  # 3 names
    columns: str  # 3 names
    values: tuple[tuple[int, ...], ...]  # [3 rows][3 columns], all different


@dataclasses.dataclass(frozen=True)
class Line:
    colour: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Lines:
    lines: tuple[Line, ...]  # 2 or 3, the highest end first; starts and ends lie in different bands


@dataclasses.dataclass(frozen=True)
class Story:
    people: tuple[str, str]
    thing: str
    numbers: tuple[int, int]  # different


Content = Grid | Bars | Table | Lines | Story


@dataclasses.dataclass(frozen=True)
class Scene:
    kind: str
    content: Content
    look: int  # seed of all that a question never asks for: tint, jitter, font

    @property
    def has_picture(self) -> bool:
        return self.kind != "story"


def band(value: int) -> int:
    """Which sixth of a line chart's height `value` lies in, 0 at the top."""
    return 5 - (value - LOWEST) * 6 // (HIGHEST - LOWEST + 1)


def split_of(content: Content) -> str:
    """The split that holds this content, whatever the seed."""
    digest = hashlib.sha256(repr(content).encode()).digest()
    return SPLITS[1] if int.from_bytes(digest[:4], "big") % HELD_OUT == 0 else SPLITS[0]


def scene(seed: int, index: int, split: str) -> Scene:
    """The scene of this number. Raises ValueError for an unknown split or an index below 0."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
    if index < 0:
        raise ValueError(f"index is {index}, expected at least 0")
    rng = random.Random(f"scene {seed} {split} {index}")  # a string's seed is hashed by SHA-512
    kind = rng.choice(KINDS)
    while split_of(content := _CONTENTS[kind](rng)) != split:
        pass
    return Scene(kind, content, rng.getrandbits(32))


def _grid(rng: random.Random) -> Grid:
    count = rng.randint(2, 4)
    pairs = rng.sample([(c, s) for c in COLOURS for s in SHAPES], 3 * count)
    numbers = _numbers(rng, 3 * count)
    cells = [Cell(*pair, number) for pair, number in zip(pairs, numbers, strict=True)]
    return Grid(tuple(tuple(cells[3 * r:3 * r + 3]) for r in range(count)))


def _bars(rng: random.Random) -> Bars:
    count = rng.randint(3, 6)
    names, colours = rng.sample(NAMES, count), rng.sample(COLOURS, count)
    return Bars(tuple(map(Bar, names, colours, _numbers(rng, count))))


def _table(rng: random.Random) -> Table:
    rows, columns = ("".join(rng.sample(names, 3)) for names in (NAMES, COLUMNS))
    values = _numbers(rng, 9)
    return Table(rows, columns, tuple(tuple(values[3 * r:3 * r + 3]) for r in range(3)))


def _lines(rng: random.Random) -> Lines:
    count = rng.randint(2, 3)
    colours = rng.sample(COLOURS, count)
    while True:
        starts, ends = _numbers(rng, count), _numbers(rng, count)
        apart = all(len({*map(band, values)}) == count for values in (starts, ends))
        if apart and all(a != b for a, b in zip(starts, ends, strict=True)):
            lines = map(Line, colours, starts, ends)
            return Lines(tuple(sorted(lines, key=lambda line: -line.end)))


def _story(rng: random.Random) -> Story:
    one, two = rng.sample(PEOPLE, 2)
    first, second = _numbers(rng, 2)
    return Story((one, two), rng.choice(THINGS), (first, second))


def _numbers(rng: random.Random, count: int) -> list[int]:
    return rng.sample(range(LOWEST, HIGHEST + 1), count)


_CONTENTS: dict[str, Callable[[random.Random], Any]] = {
    "grid": _grid, "bars": _bars, "table": _table, "lines": _lines, "story": _story}
