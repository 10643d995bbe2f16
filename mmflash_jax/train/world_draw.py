"""Scenes of the small world as pictures.

In: a `Scene`. Out: an RGB picture of 192 x 192 pixels, the same for the same scene.
Digits and letters are bitmaps of this file, so that no installed font decides what is seen; each
label lies inside one square of 32 x 32 pixels, which is one token of the target.
It knows nothing of questions or answers.
"""

import functools
import random

from PIL import Image, ImageDraw

from mmflash_jax.train.world_scenes import (
    HIGHEST,
    LOWEST,
    Bars,
    Grid,
    Line,
    Lines,
    Scene,
    Table,
    band,
)

SIZE, TOKEN = 192, 32  # pixels along a side of the picture, and of a token
JITTER = 3
TALL = (14, 21)  # the two heights of letters, in pixels
RGB = {"red": (220, 30, 30), "orange": (245, 140, 20), "yellow": (235, 210, 20),
       "green": (30, 150, 50), "cyan": (40, 190, 210), "blue": (30, 60, 210),
       "purple": (140, 40, 170), "black": (30, 30, 30)}
INK, RULE = (60, 60, 60), (190, 190, 190)  # of letters; of axes and the lines of a table

Colour = tuple[int, int, int]

_ROWS = {  # seven rows of five pixels, one bit a pixel
    "0": "01110 10001 10001 10001 10001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11110 00001 00001 01110 00001 00001 11110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 00100 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
    "A": "00100 01010 10001 10001 11111 10001 10001",
    "B": "11110 10001 10001 11110 10001 10001 11110",
    "C": "01111 10000 10000 10000 10000 10000 01111",
    "D": "11110 10001 10001 10001 10001 10001 11110",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "F": "11111 10000 10000 11110 10000 10000 10000",
    "K": "10001 10010 10100 11000 10100 10010 10001",
    "L": "10000 10000 10000 10000 10000 10000 11111",
    "M": "10001 11011 10101 10101 10001 10001 10001",
    "N": "10001 11001 11001 10101 10011 10011 10001",
    "P": "11110 10001 10001 11110 10000 10000 10000",
    "T": "11111 00100 00100 00100 00100 00100 00100",
}


def draw(scene: Scene) -> Image.Image:
    """The scene's picture. Raises ValueError for a scene without one."""
    content = scene.content
    rng = random.Random(scene.look)
    tint = (rng.randint(228, 255), rng.randint(228, 255), rng.randint(228, 255))
    image = Image.new("RGB", (SIZE, SIZE), tint)
    pen = _Pen(image, rng, rng.choice(TALL))
    if isinstance(content, Grid):
        _draw_grid(content, pen)
    elif isinstance(content, Bars):
        _draw_bars(content, pen)
    elif isinstance(content, Table):
        _draw_table(content, pen)
    elif isinstance(content, Lines):
        _draw_lines(content, pen)
    else:
        raise ValueError(f"a scene of kind {scene.kind!r} has no picture")
    return image


@functools.cache
def text_mask(text: str, tall: int) -> Image.Image:
    """`text` in letters `tall` pixels high and 10 wide, 2 apart: mode "L", 255 where there is
    ink. Raises KeyError for a letter that no scene uses."""
    mask = Image.new("L", (12 * len(text) - 2, tall))
    for i, letter in enumerate(text):
        bits = bytes(255 * int(bit) for row in _ROWS[letter].split() for bit in row)
        glyph = Image.frombytes("L", (5, 7), bits).resize((10, tall), Image.Resampling.NEAREST)
        mask.paste(glyph, (12 * i, 0))
    return mask


class _Pen:
    """Draws on one picture; `rng` moves things by a few pixels inside their token."""

    def __init__(self, image: Image.Image, rng: random.Random, tall: int):
        self.image, self.rng, self.tall = image, rng, tall
        self.on = ImageDraw.Draw(image)

    def near(self, centre: int) -> int:
        return centre + self.rng.randint(-JITTER, JITTER)

    def write(self, text: object, row: int, column: int) -> None:
        """Near the middle of a token, and never out of it."""
        mask = text_mask(str(text), self.tall)
        x, y = (self.near(TOKEN * at + (TOKEN - side) // 2)
                for at, side in zip((column, row), mask.size, strict=True))
        self.image.paste(INK, (x, y), mask)

    def shape(self, shape: str, colour: Colour, row: int, column: int) -> None:
        """At most 25 x 25 pixels inside a token, whose middle pixel has the colour."""
        x, y, r = self.near(TOKEN * column + 16), self.near(TOKEN * row + 16), 12
        if shape == "circle":
            self.on.ellipse((x - r, y - r, x + r, y + r), colour)
        elif shape == "square":
            self.on.rectangle((x - r + 2, y - r + 2, x + r - 2, y + r - 2), colour)
        elif shape == "triangle":
            self.on.polygon((x - r, y + r, x + r, y + r, x, y - r), colour)
        elif shape == "diamond":
            self.on.polygon((x - r, y, x, y - r, x + r, y, x, y + r), colour)
        else:
            self.on.rectangle((x - r, y - 4, x + r, y + 4), colour)
            self.on.rectangle((x - 4, y - r, x + 4, y + r), colour)


def _draw_grid(grid: Grid, pen: _Pen) -> None:
    """Each cell is a token with the shape and, right of it, one with the number."""
    top = pen.rng.randint(0, SIZE // TOKEN - len(grid.rows))
    for r, row in enumerate(grid.rows):
        for c, cell in enumerate(row):
            pen.shape(cell.shape, RGB[cell.colour], top + r, 2 * c)
            pen.write(cell.number, top + r, 2 * c + 1)


def _draw_bars(chart: Bars, pen: _Pen) -> None:
    """A bar is as high as its value; the value stands in the first whole token above it."""
    left = pen.rng.randint(0, SIZE // TOKEN - len(chart.bars))
    floor = SIZE - TOKEN
    for i, bar in enumerate(chart.bars):
        x, top = TOKEN * (left + i), floor - bar.value * 5 // 4
        pen.on.rectangle((x + 5, top, x + 26, floor - 1), RGB[bar.colour])
        pen.write(bar.value, top // TOKEN - 1, left + i)
        pen.write(bar.name, SIZE // TOKEN - 1, left + i)
    pen.on.line((TOKEN * left, floor, TOKEN * (left + len(chart.bars)) - 1, floor), RULE)


def _draw_table(table: Table, pen: _Pen) -> None:
    top, left = (pen.rng.randint(0, SIZE // TOKEN - 4) for _ in range(2))
    x0, y0 = TOKEN * left, TOKEN * top
    for i in range(4):  # a line above each row and left of each column, but none around
        if i:
            pen.on.line((x0, y0 + TOKEN * i, x0 + 4 * TOKEN - 1, y0 + TOKEN * i), RULE)
            pen.on.line((x0 + TOKEN * i, y0, x0 + TOKEN * i, y0 + 4 * TOKEN - 1), RULE)
    for i in range(3):
        pen.write(table.columns[i], top, left + i + 1)
        pen.write(table.rows[i], top + i + 1, left)
        for j in range(3):
            pen.write(table.values[i][j], top + i + 1, left + j + 1)


def line_height(value: int) -> int:
    """The pixel row of a value in a line chart; lies in the token row `band(value)`."""
    into = (value - LOWEST) * 6 % (HIGHEST - LOWEST + 1)  # the position in the band, times 90
    return TOKEN * band(value) + TOKEN - 1 - into * TOKEN // (HIGHEST - LOWEST + 1)


def _draw_lines(chart: Lines, pen: _Pen) -> None:
    """Lines run through the four middle columns of tokens; the outer two hold their values."""
    left, right = TOKEN + 2, SIZE - TOKEN - 3
    for line in chart.lines:
        points = _points(line, left, right, pen.rng)
        pen.on.line(points, RGB[line.colour], width=3)
        for x, y in (points[0], points[-1]):
            pen.on.rectangle((x - 2, y - 4, x + 2, y + 4), RGB[line.colour])
    for line in chart.lines:
        pen.write(line.start, band(line.start), 0)
        pen.write(line.end, band(line.end), SIZE // TOKEN - 1)


def _points(line: Line, left: int, right: int, rng: random.Random) -> list[tuple[int, int]]:
    """Five points, the inner ones off the straight way by up to 10 pixels."""
    first, last = line_height(line.start), line_height(line.end)
    points = []
    for i in range(5):
        y = first + (last - first) * i // 4 + (rng.randint(-10, 10) if 0 < i < 4 else 0)
        points.append((left + (right - left) * i // 4, min(max(y, 2), SIZE - 3)))
    return points
