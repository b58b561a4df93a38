"""The page of an acceptance run: one HTML file, its charts inline, nothing loaded from anywhere. Pure.

Shows what the document holds and computes nothing but places.
"""

import html
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tools.svg_chart import Chart, table, top_of

PP, TP, CONTROL = "#f6d9a8", "#cfe3f5", "#ececec"
LAYOUT_COLOURS = {"PP": PP, "TP": TP}
BLUE, RED, GREEN, ORANGE, GREY, PURPLE = "#1f5fa8", "#b3261e", "#2e7d32", "#c76a00", "#8a8a8a", "#6a3fa0"
PALETTE = (BLUE, RED, GREEN, ORANGE, PURPLE, "#00838f", "#ad1457", "#5d4037", GREY)
WAY_COLOURS = {"PP": ORANGE, "TP": BLUE}
NS_PER_S = 1e9
LEAST_MS = 1.0
"""Lower end of scales of gaps."""

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#222;background:#fff;max-width:1120px;margin:24px auto;padding:0 16px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 8px}
.verdict{display:inline-block;padding:3px 12px;border-radius:4px;color:#fff;font-weight:600}
.good{background:#2e7d32}.bad{background:#b3261e}pre{font-size:12px;color:#555;white-space:pre-wrap;margin:8px 0}
table{border-collapse:collapse;width:100%;font-size:13px}
th{text-align:left;border-bottom:1px solid #999;padding:3px 8px}
td{border-bottom:1px solid #e5e5e5;padding:3px 8px;vertical-align:top}td:not(:last-child){white-space:nowrap}
tr.fail td{background:#fde7e5}
figure{margin:14px 0}figcaption{margin-bottom:2px}
svg{width:100%;height:auto;background:#fcfcfc;border:1px solid #e2e2e2}
svg text{font-size:11px;fill:#555}svg text.unit{fill:#222;font-weight:600}.grid{stroke:#dadada;stroke-width:.7}
.key{margin-left:14px;font-size:12px;color:#444}.key i{display:inline-block;width:11px;height:11px;margin-right:4px;
border-radius:2px;vertical-align:-1px}p.note{color:#555;margin:2px 0 0}
"""

Document = dict[str, Any]
Place = Callable[[int], float]


def page_of(document: Document) -> str:
    """One HTML document."""
    run, verdict = document["run"], "accepted" if document["passed"] else "not accepted"
    title = f"{run['ranks']} ranks, {run['model']}, {run['minutes']:g} minutes: {verdict}"
    parts = [
        f"<h1>Acceptance <span class='verdict {'good' if document['passed'] else 'bad'}'>{verdict}</span></h1>",
        f"<p>{html.escape(run['model'])} on {run['ranks']} ranks; {run['minutes']:g} minutes under the policy auto "
        f"after {run['control_s']:g} s with no flips. Load: {html.escape(run['load'])}.</p>",
        f"<pre>{html.escape(run['statement'])}</pre>",
        _checks(document),
        "<h2>Layout and load</h2>",
        _layouts(document),
        _rates(document),
        "<h2>Token gaps</h2>",
        _gaps_by_second(document),
        _gaps_by_flip(document),
        _figures(document),
        "<h2>First tokens</h2>",
        _first_tokens(document),
        "<h2>Census, memory, descriptors</h2>",
        _census(document),
        _memory(document),
        _descriptors(document),
        "<h2>Flips</h2>",
        _flips(document),
    ]
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _place(document: Document) -> Place:
    begin_ns = document["run"]["window"]["control_begin_ns"]
    return lambda unix_ns: (unix_ns - begin_ns) / NS_PER_S


def _span(document: Document) -> tuple[float, float]:
    return 0.0, _place(document)(document["run"]["window"]["end_ns"])


def _with_layouts(document: Document, chart: Chart) -> Chart:
    """The layouts in force behind whatever is shown, and where the control ends."""
    place, spans = _place(document), document["layouts"]
    ends = [place(span["began_unix_ns"]) for span in spans[1:]] + [chart.x[1]]
    for span, end in zip(spans, ends, strict=False):
        begin = place(span["began_unix_ns"])
        if end > 0:
            chart.band(
                max(0.0, begin), end, LAYOUT_COLOURS.get(span["layout"], CONTROL), f"{span['layout']}: {span['reason']}"
            )
    chart.mark(place(document["run"]["window"]["auto_begin_ns"]), "#000", "the policy decides from here on")
    return chart


def _checks(document: Document) -> str:
    checks = document["checks"]
    rows = [("yes" if check["passed"] else "NO", check["name"], check["statement"]) for check in checks]
    return table(("kept", "promise", "evidence"), rows, classes=lambda place: "" if checks[place]["passed"] else "fail")


def _layouts(document: Document) -> str:
    place, loads, seconds = _place(document), document["loads"], document["seconds"]
    waiting = [(place(load["unix_ns"]), load["uncomputed_prefill_tokens"]) for load in loads]
    rows = [(second + 0.5, values["decoding"]) for second, values in enumerate(seconds)]
    chart = Chart(
        "Layout over load",
        _span(document),
        (0.0, top_of(tokens for _, tokens in waiting)),
        "prompt tokens to compute",
        second=(0.0, top_of(count for _, count in rows)),
        second_unit="streams decoding",
        height=260,
    )
    _with_layouts(document, chart)
    chart.line(waiting, RED, "prompt tokens admitted and not computed")
    chart.line(rows, BLUE, "streams that decode", on_second=True)
    chart._legend += [(PP, "PP"), (TP, "TP")]
    note = "<p class='note'>Left of the dashed line: the control, the same load with no flips.</p>"
    return chart.markup() + note


def _rates(document: Document) -> str:
    tokens = [(second + 0.5, values["tokens"]) for second, values in enumerate(document["seconds"])]
    chart = Chart(
        "Tokens streamed in each second", _span(document), (0.0, top_of(count for _, count in tokens)), "tokens/s"
    )
    _with_layouts(document, chart).line(tokens, GREEN, "all streams")
    return chart.markup()


def _gaps_by_second(document: Document) -> str:
    gaps = [
        (second + 0.5, values["longest_gap_ms"])
        for second, values in enumerate(document["seconds"])
        if values["longest_gap_ms"]
    ]
    chart = Chart(
        "Longest gap between two tokens of a stream, by the second in which it ended",
        _span(document),
        (LEAST_MS, top_of((gap for _, gap in gaps), 100.0)),
        "ms",
        is_log=True,
    )
    _with_layouts(document, chart).dots(gaps, RED, "longest gap of the second")
    return chart.markup()


def _gaps_by_flip(document: Document) -> str:
    flips = [flip for flip in document["flips"] if flip["gaps"]]
    if not flips:
        return "<p>No stream ran across a flip.</p>"
    highest = max(gap["gap_ms"] for flip in flips for gap in flip["gaps"])
    x_range = (-0.6, len(flips) - 0.4)
    chart = Chart(
        "Gaps of the streams that ran across each flip",
        x_range,
        (LEAST_MS, top_of([highest])),
        "ms",
        is_log=True,
        x_unit="flip",
        height=260,
    )
    for place, flip in enumerate(flips):
        chart.dots([(place - 0.15, gap["usual_ms"]) for gap in flip["gaps"]], GREY, "usual gap of the stream")
        colour = WAY_COLOURS[flip["target"]]
        chart.dots([(place + 0.1, gap["gap_ms"]) for gap in flip["gaps"]], colour, f"over a flip to {flip['target']}")
        if flip["pause_ns"] is not None:
            chart.dots([(place + 0.3, flip["pause_ns"] / 1e6)], "#000", "pause of the ranks", 3.4)
    return chart.markup([str(flip["flip_id"]) for flip in flips])


def _figures(document: Document) -> str:
    figures = document["figures"]
    rows = [_row(f"pause, {way}", found, None) for way, found in figures["pause"].items()]
    rows += [_row(f"gap over a flip, {way}", found, None) for way, found in figures["gap_at_flip"].items()]
    control = figures["control_added_gap"]
    rows += [_row(f"added gap, {way}", found, control) for way, found in figures["added_gap"].items()]
    rows.append(_row("longest gap beside a long prompt", figures["burst_gaps"], figures["control_burst_gaps"]))
    rows.append(_row("all token gaps", figures["token_gaps"], figures["control_token_gaps"]))
    for kind, found in figures["ttft"].items():
        rows.append(_row(f"first token, {kind}", found, figures["control_ttft"].get(kind)))
    for kind, found in figures["decode"].items():
        rows.append(_row(f"tokens/s of a stream, {kind}", found, figures["control_decode"].get(kind)))
    rate = f"{figures['tokens_per_s']:.1f}", f"{figures['control_tokens_per_s']:.1f}"
    rows.append(("tokens/s in all", rate[0], "", "", "", rate[1], "", ""))
    head = ("ms, where not said otherwise", "p50", "p99", "max", "count", "control p50", "p99", "max")
    return table(head, rows)


def _row(name: str, found: Document | None, control: Document | None) -> tuple[str, ...]:
    def cells(spread: Document | None) -> list[str]:
        return ["", "", ""] if spread is None else [f"{spread[key]:,.1f}" for key in ("p50", "p99", "max")]

    return name, *cells(found), "0" if found is None else str(found["count"]), *cells(control)


def _first_tokens(document: Document) -> str:
    place, kinds = _place(document), defaultdict(list)
    for stream in document["streams"]:
        if stream["first_unix_ns"] is not None:
            asked_ns = stream["asked_unix_ns"]
            kinds[stream["kind"]].append((place(asked_ns), (stream["first_unix_ns"] - asked_ns) / 1e6))
    highest = [wait for points in kinds.values() for _, wait in points]
    chart = Chart(
        "From sending to the first streamed token", _span(document), (10.0, top_of(highest, 100.0)), "ms", is_log=True
    )
    _with_layouts(document, chart)
    for (kind, points), colour in zip(sorted(kinds.items()), (RED, BLUE, GREEN), strict=False):
        chart.dots(points, colour, kind)
    return chart.markup()


def _census(document: Document) -> str:
    place, loads = _place(document), document["loads"]
    total = max((load["total_blocks"] for load in loads), default=1)
    chart = Chart("Blocks of the pool, counted by owner", _span(document), (0.0, top_of([total])), "blocks", height=160)
    lower = [(place(load["unix_ns"]), 0.0) for load in loads]
    for key, colour in (("held_blocks", ORANGE), ("cached_blocks", "#9cc3e6"), ("free_blocks", "#dfeede")):
        upper = [(x, y + load[key]) for (x, y), load in zip(lower, loads, strict=True)]
        chart.area(upper, colour, key.removesuffix("_blocks"), lower)
        lower = upper
    return chart.markup()


def _by_process(document: Document, key: str, divisor: float) -> dict[str, list[tuple[float, float]]]:
    place, series = _place(document), defaultdict(list)
    for cost in document["costs"]:
        series[cost["process"]].append((place(cost["unix_ns"]), cost[key] / divisor))
    return series


def _lines(document: Document, title: str, unit: str, series: dict[str, list[tuple[float, float]]]) -> str:
    highest = [value for points in series.values() for _, value in points]
    chart = Chart(title, _span(document), (0.0, top_of(highest)), unit)
    for place, (process, points) in enumerate(sorted(series.items())):
        chart.line(points, PALETTE[place % len(PALETTE)], process)
    return chart.markup()


def _memory(document: Document) -> str:
    series = _by_process(document, "private_bytes", 2**20)
    free = [(_place(document)(at_ns), value / 2**20) for at_ns, value in document["free_bytes"]]
    corridor = Chart(
        "Memory the machine could still give", _span(document), (0.0, top_of(mb for _, mb in free)), "MB", height=140
    )
    corridor.line(free, GREEN, "free")
    return _lines(document, "Memory of each process's own", "MB", series) + corridor.markup()


def _descriptors(document: Document) -> str:
    return _lines(document, "Open descriptors", "", _by_process(document, "num_descriptors", 1))


def _flips(document: Document) -> str:
    place, causes = _place(document), document["layouts"]
    rows = []
    for flip in document["flips"]:
        ended_ns = flip["pause_end_unix_ns"] or flip["armed_unix_ns"]
        cause = next(
            (c["reason"] for c in reversed(causes) if c["layout"] == flip["target"] and c["began_unix_ns"] <= ended_ns),
            "",
        )
        gaps = [gap["gap_ms"] for gap in flip["gaps"]]
        rows.append(
            (
                str(flip["flip_id"]),
                f"{place(flip['armed_unix_ns']):.1f} s",
                f"{flip['source']} to {flip['target']}",
                flip["state"],
                "" if flip["pause_ns"] is None else f"{flip['pause_ns'] / 1e6:.1f}",
                f"{max(gaps):.0f}" if gaps else "",
                f"{flip['num_carried']} ({flip['num_partly_prefilled']})",
                cause if flip["state"] == "committed" else flip["reason"],
            )
        )
    head = ("flip", "at", "way", "end", "pause ms", "longest gap ms", "carried (partly prefilled)", "why")
    return table(head, rows, classes=lambda at: "" if document["flips"][at]["state"] == "committed" else "fail")
