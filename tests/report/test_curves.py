"""Line charts as SVG."""

import re
import xml.etree.ElementTree as ET

from arvideo_rl.report.curves import curves

SVG = "{http://www.w3.org/2000/svg}"


def test_every_line_is_drawn_inside_its_panel_and_named_once():
    names = [f"line {i}" for i in range(7)] + ["<a & b>"]
    lines = {name: [(0, i), (50, 1.5 * i), (100, i)] for i, name in enumerate(names)}
    page = ET.fromstring(curves({"up": lines, "flat": {name: [(0, 2.0), (9, 2.0)] for name in names}}))
    drawn = page.findall(f".//{SVG}polyline")
    assert len(drawn) == 16 and len({(x.get("stroke"), x.get("stroke-dasharray")) for x in drawn}) == 8
    for line in drawn:
        points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
        assert all(48 <= x <= 408 and 26 <= y <= 206 for x, y in points)
    first = [float(y) for y in re.findall(r",([\d.]+)", drawn[1].get("points"))]
    assert first[1] < first[0] == first[2], "larger values stand higher"
    texts = [x.text for x in page.iter(f"{SVG}text")]
    assert all(texts.count(name) == 1 for name in names) and {"up", "flat", "100"} <= set(texts)
