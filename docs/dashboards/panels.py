"""Grafana's JSON for a dashboard: variables, links, and panels that are laid out in rows.

A panel is a function of a title, a sentence of description and its queries; each query is an
expression and the legend of its series. `dashboard` numbers the panels and places them.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
Query = tuple[str, str]

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
TITLES = {
    "sgl-ext-node": "sgl-ext: node",
    "sgl-ext-tenants": "sgl-ext: tenants",
    "sgl-ext-cache": "sgl-ext: cache",
}
GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "text"


def thresholds(base: str, *steps: tuple[float, str]) -> Json:
    """A colour from each value on; `base` is the colour below the first."""
    first = {"color": base, "value": None}
    rest = [{"color": color, "value": value} for value, color in steps]
    return {"mode": "absolute", "steps": [first, *rest]}


def graph(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "short",
    width: int = 8,
    stacked: bool = False,
    most: float | None = None,
    marks: Json | None = None,
) -> Json:
    """Lines over time, from zero. `most`: the axis' end. `marks`: thresholds, drawn as lines."""
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 25 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "off" if marks is None else "dashed"},
    }
    defaults: Json = {"unit": unit, "min": 0, "custom": custom}
    defaults["thresholds"] = marks or thresholds(GREEN)
    if most is not None:
        defaults["max"] = most
    legend = {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "lastNotNull"]}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return _panel("timeseries", title, text, queries, defaults, options, width, 8)


def stat(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "short",
    width: int = 3,
    colors: Json | None = None,
    shows_name: bool = False,
) -> Json:
    """One number, and its course behind it. `shows_name`: the series' name in its place."""
    defaults = {"unit": unit, "thresholds": colors or thresholds(BLUE), "noValue": "none"}
    options = {
        "colorMode": "value",
        "graphMode": "none" if shows_name else "area",
        "textMode": "name" if shows_name else "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return _panel("stat", title, text, queries, defaults, options, width, 4)


def states(title: str, text: str, query: Query, names: dict[int, tuple[str, str]]) -> Json:
    """A band for each series, coloured by its value. `names`: a name and a colour by value."""
    mapping = {
        str(value): {"text": name, "color": color, "index": index}
        for index, (value, (name, color)) in enumerate(names.items())
    }
    defaults = {
        "custom": {"fillOpacity": 70, "lineWidth": 0},
        "mappings": [{"type": "value", "options": mapping}],
        "thresholds": thresholds(GREY),
    }
    options = {
        "mergeValues": True,
        "showValue": "auto",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "single"},
    }
    return _panel("state-timeline", title, text, (query,), defaults, options, 24, 7)


def bars(title: str, text: str, *queries: Query, unit: str, colors: Json, width: int = 8) -> Json:
    """A bar from 0 to 1 for the present value of each series."""
    defaults = {"unit": unit, "min": 0, "max": 1, "thresholds": colors}
    options = {
        "displayMode": "basic",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
    }
    panel = _panel("bargauge", title, text, queries, defaults, options, width, 8)
    for target in panel["targets"]:
        target["instant"], target["range"] = True, False
    return panel


def heatmap(title: str, text: str, expression: str, *, unit: str, width: int = 12) -> Json:
    """How a histogram's observations spread. `expression`: their rate by `le`."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 32, "exponent": 0.5},
        "yAxis": {"unit": unit, "axisPlacement": "left"},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
    }
    panel = _panel("heatmap", title, text, ((expression, "{{le}}"),), {}, options, width, 8)
    panel["targets"][0]["format"] = "heatmap"
    return panel


def row(title: str, *panels: Json, collapsed: bool = False) -> Json:
    """A row of panels; `collapsed`: closed until somebody opens it."""
    return {"type": "row", "title": title, "collapsed": collapsed, "panels": list(panels)}


def variable(name: str, label: str, metric: str, of: str, *, several: bool = True) -> Json:
    """A choice among the values of a metric's label."""
    query = f"label_values({metric}, {of})"
    chosen = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "A"},
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
        "allValue": ".+" if several else None,
        "current": chosen if several else {},
        "options": [],
        "hide": 0,
    }


def dashboard(uid: str, text: str, variables: list[Json], rows: list[Json]) -> Json:
    """A whole dashboard, with links to the others that keep the time and the variables."""
    source = {
        "type": "datasource",
        "name": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
        "current": {},
        "options": [],
        "refresh": 1,
        "regex": "",
        "hide": 0,
    }
    links = [
        {
            "type": "link",
            "title": title,
            "url": f"/d/{other}",
            "icon": "dashboard",
            "includeVars": True,
            "keepTime": True,
            "targetBlank": False,
            "tags": [],
            "tooltip": "",
            "asDropdown": False,
        }
        for other, title in TITLES.items()
        if other != uid
    ]
    return {
        "uid": uid,
        "title": TITLES[uid],
        "description": text,
        "tags": ["sgl-ext"],
        "editable": True,
        "graphTooltip": 1,
        "links": links,
        "panels": _placed(rows),
        "refresh": "30s",
        "schemaVersion": 39,
        "style": "dark",
        "templating": {"list": [source, *variables]},
        "time": {"from": "now-3h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "version": 1,
        "weekStart": "",
        "annotations": {"list": []},
    }


def _panel(
    kind: str,
    title: str,
    text: str,
    queries: tuple[Query, ...],
    defaults: Json,
    options: Json,
    width: int,
    height: int,
) -> Json:
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": _SOURCE,
            "editorMode": "code",
            "expr": expression,
            "legendFormat": legend,
            "range": True,
        }
        for number, (expression, legend) in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "gridPos": {"h": height, "w": width, "x": 0, "y": 0},
    }


def _placed(rows: list[Json]) -> list[Json]:
    """The panels with ids and places: in each row from left to right, in as many lines as needed.
    Those of a closed row are inside it."""
    placed: list[Json] = []
    number, y = 0, 0
    for each in rows:
        number += 1
        head = each | {"id": number, "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": y}}
        placed.append(head)
        y, x, line = y + 1, 0, 0
        for panel in each["panels"]:
            number += 1
            place = panel["gridPos"]
            if x + place["w"] > _COLUMNS:
                y, x, line = y + line, 0, 0
            place |= {"x": x, "y": y}
            panel["id"] = number
            x, line = x + place["w"], max(line, place["h"])
        y += line
        if not each["collapsed"]:
            placed += each["panels"]
            head["panels"] = []
    return placed
