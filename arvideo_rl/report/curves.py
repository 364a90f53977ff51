"""Line charts as one SVG file, for pages that a browser or a code host shows."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 230, 48, 12, 26, 24  # of a panel and its margins
INKS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")
DASHES = ("none", "6 3", "2 2")  # after six lines the inks come again, dashed
STYLE = "text{font:11px sans-serif;fill:#333}.t{font-weight:bold;font-size:13px}"
Line = list[tuple[float, float]]


def curves(panels: dict[str, dict[str, Line]]) -> str:
    """``panels`` {title: {name: [(x, y), ...]}} with the same names in each; two panels in a row, one legend."""
    names = list(next(iter(panels.values())))
    pens = {n: f'stroke="{INKS[i % 6]}" stroke-dasharray="{DASHES[i // 6 % 3]}"' for i, n in enumerate(names)}
    parts = [_panel(i, title, lines, pens) for i, (title, lines) in enumerate(panels.items())]
    rows, odd = -(-len(panels) // 2), len(panels) % 2
    x0, y0 = (WIDTH + LEFT, (rows - 1) * HEIGHT + TOP) if odd else (LEFT, rows * HEIGHT)  # the free place, or below
    for i, name in enumerate(names):
        x, y = x0 + i % 3 * 120, y0 + 18 * (i // 3) + 12
        parts.append(f'<path d="M{x} {y - 4}h20" {pens[name]} stroke-width="2.5"/>'
                     f'<text x="{x + 25}" y="{y}">{escape(name)}</text>')  # fmt: skip
    tall = rows * HEIGHT + (0 if odd else 18 * -(-len(names) // 3) + 14)
    paper = f'<style>{STYLE}</style><rect width="{2 * WIDTH}" height="{tall}" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {tall}">{paper}'
    return "\n".join([head, *parts, "</svg>\n"])


def _panel(place: int, title: str, lines: dict[str, Line], pens: dict[str, str]) -> str:
    (x0, x1), (low, high) = ((min(v), max(v)) for v in zip(*(p for line in lines.values() for p in line)))
    room = 0.05 * (high - low) or 1e-3
    y0, y1 = low - room, high + room

    def at(x: float, y: float) -> tuple[float, float]:
        return (LEFT + (WIDTH - LEFT - RIGHT) * (x - x0) / ((x1 - x0) or 1),
                TOP + (HEIGHT - TOP - BOTTOM) * (y1 - y) / (y1 - y0))  # fmt: skip

    parts = [f'<g transform="translate({place % 2 * WIDTH},{place // 2 * HEIGHT})">',
             f'<text x="{LEFT}" y="16" class="t">{escape(title)}</text>']  # fmt: skip
    for k in range(5):
        x, y = x0 + (x1 - x0) * k / 4, y0 + (y1 - y0) * k / 4
        px, py = at(x, y)
        parts.append(f'<path d="M{LEFT} {py:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
                     f'<text x="{LEFT - 4}" y="{py + 3:.1f}" text-anchor="end">{y:.3g}</text>'
                     f'<text x="{px:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{x:.0f}</text>')  # fmt: skip
    for name, line in lines.items():
        points = " ".join("{:.1f},{:.1f}".format(*at(*p)) for p in line)
        parts.append(f'<polyline points="{points}" {pens[name]} fill="none" stroke-width="1.5"/>')
    return "".join(parts) + "</g>"
