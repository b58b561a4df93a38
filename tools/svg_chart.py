"""Charts as inline SVG: axes, lines, areas, bands and dots, in a page that needs nothing from elsewhere. Pure.

Values in, markup out; nothing here knows what is shown.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 1080, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 64, 26, 30
NUM_TICKS = 5
MAX_POINTS = 1500
"""Of one line: more than a screen has columns."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """Takes values in [low, high] to pixels; logarithmic where asked, `low` above 0 then."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value, kept within the scale."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round numbers within the scale."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers]
        step = _round_up((self.high - self.low) / NUM_TICKS)
        first = math.ceil(self.low / step)
        return [place * step for place in range(first, math.floor(self.high / step) + 1)]


def _round_up(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)


def top_of(values: Iterable[float], least: float = 1.0) -> float:
    """A scale's upper end with a little room."""
    return max([least, *values]) * 1.05


@dataclass(slots=True)
class Chart:
    """One chart; parts are drawn in the order in which they are added."""

    title: str
    x: tuple[float, float]
    y: tuple[float, float]
    unit: str = ""
    is_log: bool = False
    second: tuple[float, float] | None = None
    """Another scale, at the right."""
    second_unit: str = ""
    height: int = HEIGHT
    x_unit: str = "s"
    _parts: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)

    @property
    def _across(self) -> Scale:
        return Scale(self.x[0], max(self.x[1], self.x[0] + 1e-9), LEFT, WIDTH - RIGHT)

    @property
    def _up(self) -> Scale:
        return Scale(self.y[0], max(self.y[1], self.y[0] + 1e-9), self.height - BOTTOM, TOP, self.is_log)

    @property
    def _up_second(self) -> Scale:
        low, high = self.second or self.y
        return Scale(low, max(high, low + 1e-9), self.height - BOTTOM, TOP)

    def band(self, begin: float, end: float, colour: str, label: str = "") -> None:
        """A stretch of the x axis from top to bottom."""
        left, right = self._across.at(begin), self._across.at(end)
        if right > left:
            shape = f'x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{self.height - TOP - BOTTOM}"'
            self._parts.append(f'<rect {shape} fill="{colour}">{_tip(label)}</rect>')

    def line(self, points: Points, colour: str, label: str, *, on_second: bool = False) -> None:
        """A line through points."""
        if points:
            places = self._places(points, self._up_second if on_second else self._up)
            self._parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        self._note(colour, label)

    def area(self, points: Points, colour: str, label: str, below: Points | None = None) -> None:
        """A filled stretch between points and the lower end, or between two lines over the same x."""
        if points:
            lower = below or [(points[0][0], self.y[0]), (points[-1][0], self.y[0])]
            places = f"{self._places(points, self._up)} {self._places(lower[::-1], self._up)}"
            self._parts.append(f'<polygon points="{places}" fill="{colour}" stroke="none"/>')
        self._note(colour, label)

    def dots(self, points: Points, colour: str, label: str, radius: float = 2.6) -> None:
        """A dot for each point."""
        across, up = self._across, self._up
        self._parts += [
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="{radius}" fill="{colour}" fill-opacity=".65">'
            f"{_tip(f'{y:.1f} {self.unit}')}</circle>"
            for x, y in points
        ]
        self._note(colour, label)

    def mark(self, x: float, colour: str, tip: str) -> None:
        """A thin line from top to bottom."""
        at = self._across.at(x)
        ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}"'
        self._parts.append(f'<line {ends} stroke="{colour}" stroke-width="1" stroke-dasharray="3 2">{_tip(tip)}</line>')

    def _places(self, points: Points, up: Scale) -> str:
        across, step = self._across, max(1, len(points) // MAX_POINTS)
        return " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in points[::step])

    def _note(self, colour: str, label: str) -> None:
        if label and (colour, label) not in self._legend:
            self._legend.append((colour, label))

    def markup(self, x_names: Sequence[str] | None = None) -> str:
        """The finished figure; `x_names` stand at 0, 1, 2, … instead of numbers."""
        legend = "".join(
            f'<span class="key"><i style="background:{colour}"></i>{html.escape(label)}</span>'
            for colour, label in self._legend
        )
        frame = "".join([*self._rows(), *self._columns(x_names)])
        box = f'viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{html.escape(self.title)}"'
        return (
            f"<figure><figcaption><b>{html.escape(self.title)}</b>{legend}</figcaption>"
            f"<svg {box}>{''.join(self._parts)}{frame}</svg></figure>"
        )

    def _rows(self) -> list[str]:
        up = self._up
        lines = [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up.at(tick):.1f}" y2="{up.at(tick):.1f}"/>'
            f'<text x="{LEFT - 6}" y="{up.at(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
            for tick in up.ticks()
        ]
        lines.append(f'<text class="unit" x="4" y="15">{html.escape(self.unit)}</text>')
        if self.second is not None:
            right = self._up_second
            lines += [
                f'<text x="{WIDTH - RIGHT + 6}" y="{right.at(tick) + 4:.1f}">{_number(tick)}</text>'
                for tick in right.ticks()
            ]
            place = f'x="{WIDTH - 4}" y="15" text-anchor="end"'
            lines.append(f'<text class="unit" {place}>{html.escape(self.second_unit)}</text>')
        return lines

    def _columns(self, names: Sequence[str] | None) -> list[str]:
        across, y = self._across, self.height - BOTTOM + 16
        ticks: list[tuple[float, str]] = [(tick, _number(tick)) for tick in across.ticks()]
        if names is not None:
            step = max(1, math.ceil(len(names) / 24))
            ticks = [(place, name) for place, name in enumerate(names) if place % step == 0]
        return [
            *(
                f'<text x="{across.at(x):.1f}" y="{y}" text-anchor="middle">{html.escape(text)}</text>'
                for x, text in ticks
            ),
            f'<text class="unit" x="{WIDTH - 4}" y="{y}" text-anchor="end">{html.escape(self.x_unit)}</text>',
        ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:g}"


def _tip(text: str) -> str:
    return f"<title>{html.escape(text)}</title>" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, classes: Callable[[int], str] = lambda _: "") -> str:
    """An HTML table of plain text; `classes` gives a row's class by its place."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        f'<tr class="{classes(place)}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for place, row in enumerate(rows)
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
