"""Pictures of figures: lines over numbers, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 230, 40, 50
_COLOURS = ("#1a7f37", "#d1242f", "#0969da", "#9a6700", "#8250df", "#57606a", "#bf3989")


@dataclass(frozen=True)
class Picture:
    """Lines of shares between 0 and 1. name: of its file. places: under the axis, in order; a line
    has a share, or None, for each of them. level: a share that is marked."""

    name: str
    title: str
    axis: str
    command: str
    places: Sequence[str]
    lines: Mapping[str, Sequence[float | None]]
    level: float | None = None


def svg(picture: Picture) -> str:
    """The file's text. Equal figures give equal texts."""
    count = max(len(picture.places) - 1, 1)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(place: int) -> float:
        return round(_LEFT + wide * place / count, 1)

    def y(share: float) -> float:
        return round(_TOP + high * (1 - share), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(picture.title)}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 12}">{escape(picture.axis)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{_LEFT} {y(share)}h{wide}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(share) + 4}" text-anchor="end">{share:g}</text>')
    if picture.level is not None:
        dashes = 'stroke="#57606a" stroke-dasharray="4"'
        parts.append(f'<path d="M{_LEFT} {y(picture.level)}h{wide}" {dashes}/>')
    for place, text in enumerate(picture.places):
        at = f'x="{x(place)}" y="{_HEIGHT - _BOTTOM + 18}"'
        parts.append(f'<text {at} text-anchor="middle">{escape(text)}</text>')
    for number, (label, shares) in enumerate(picture.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(x(n), y(share)) for n, share in enumerate(shares) if share is not None]
        line = " ".join(f"{one},{other}" for one, other in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a}" cy="{b}" r="3" fill="{colour}"/>' for a, b in points]
        at = f'x="{_WIDTH - _RIGHT + 14}" y="{_TOP + 12 + 18 * number}"'
        parts.append(f'<text {at} fill="{colour}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
