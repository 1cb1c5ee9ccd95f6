"""The few pieces of Grafana's classic dashboard JSON that the dashboards are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]

SCHEMA_VERSION = 39
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
GRID_COLUMNS = 24
TAG = "kvheadroom"

# Dashes and fill tell lines apart where colour does not.
DASHED: Json = {"lineStyle": {"fill": "dash", "dash": [8, 6]}}
DOTTED: Json = {"lineStyle": {"fill": "dot", "dash": [0, 8]}}

Step = tuple[float, str]
"""From which value on a colour holds."""


def query(ref_id: str, expression: str, legend: str) -> Json:
    """One PromQL of a panel, over the time that is shown."""
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expression,
        "legendFormat": legend,
        "range": True,
        "refId": ref_id,
    }


def now(ref_id: str, expression: str) -> Json:
    """One PromQL of a table, as it is at the end of the time that is shown."""
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expression,
        "format": "table",
        "instant": True,
        "range": False,
        "refId": ref_id,
    }


def look(matcher: str, of: str, custom: Json) -> Json:
    """An override of how some lines are drawn, e.g. `byFrameRefID` and `A`."""
    return {
        "matcher": {"id": matcher, "options": of},
        "properties": [{"id": f"custom.{key}", "value": value} for key, value in custom.items()],
    }


def words(texts: Mapping[int, str], colors: Sequence[Step] = ()) -> list[Json]:
    """What stands in place of single values.

    Args:
        texts: the word for each value.
        colors: from which value on a word has which colour; without, the thresholds decide.
    """
    options: dict[str, Json] = {}
    for i, (value, text) in enumerate(texts.items()):
        options[str(value)] = {"text": text, "index": i}
        for start, color in colors:
            if value >= start:
                options[str(value)]["color"] = color
    return [{"type": "value", "options": options}]


def steps(*above: Step, below: str = "green") -> Json:
    """Thresholds: `below` under the first of them."""
    return {
        "mode": "absolute",
        "steps": [
            {"color": below, "value": None},
            *({"color": color, "value": value} for value, color in above),
        ],
    }


def judged(*above: Step, below: str = "green") -> Json:
    """Thresholds of a number that may be absent: that is neither good nor bad, so it has no colour."""
    return steps((0, below), *above, below="text")


def runbook(alert: str) -> Json:
    """A link to the text that one of the chosen daemons serves about an alert."""
    return {
        "title": f"Runbook {alert}",
        "url": f"http://${{daemon}}/runbooks/{alert}",
        "targetBlank": True,
    }


# --- panels ---


def _panel(
    kind: str, title: str, description: str, queries: Sequence[Json], *, defaults: Json, options: Json
) -> Json:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": list(queries),
    }


def time_series(
    title: str,
    description: str,
    queries: Sequence[Json],
    *,
    unit: str,
    when_empty: str,
    decimals: int | None = None,
    lowest: float | None = 0,
    highest: float | None = None,
    calcs: tuple[str, ...] = (),
    limits: Sequence[Step] = (),
    below: str = "transparent",
    custom: Json | None = None,
    overrides: Sequence[Json] = (),
    min_interval: str | None = None,
    links: Sequence[Json] = (),
) -> Json:
    """A panel of lines over time.

    Args:
        title: what it shows, in a few words.
        description: with the names of its metrics, and what to do.
        queries: drawn in this order, so what comes last is on top.
        unit: Grafana's id of it.
        when_empty: what stands in the panel when the queries have no series.
        decimals: digits after the point, Grafana's choice without.
        lowest, highest: fixed ends of the y axis.
        calcs: with some, the legend is a table with these columns; else it is a list.
        limits: drawn as dashed lines across.
        below: colour of what is below the first limit.
        custom: how lines are drawn, where it differs from the plain line.
        overrides: how single lines are.
        min_interval: shortest time between two points.
        links: in the panel's menu.
    """
    drawn = {**_PLAIN_LINE, **(custom or {})}
    if limits:
        drawn["thresholdsStyle"] = {"mode": "dashed"}
    defaults: Json = {
        "color": {"mode": "palette-classic"},
        "custom": drawn,
        "noValue": when_empty,
        "thresholds": steps(*limits, below=below),
        "unit": unit,
    }
    for key, value in (("decimals", decimals), ("min", lowest), ("max", highest)):
        if value is not None:
            defaults[key] = value
    legend: Json = {
        "showLegend": True,
        "displayMode": "table" if calcs else "list",
        "placement": "bottom",
        "calcs": list(calcs),
    }
    panel = _panel(
        "timeseries",
        title,
        description,
        queries,
        defaults=defaults,
        options={"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
    )
    panel["fieldConfig"]["overrides"] = list(overrides)
    if min_interval is not None:
        panel["interval"] = min_interval
    if links:
        panel["links"] = list(links)
    return panel


_PLAIN_LINE: Json = {
    "drawStyle": "line",
    "lineInterpolation": "linear",
    "lineWidth": 2,
    "fillOpacity": 0,
    "showPoints": "auto",
    # Numbers that the exporter withheld are a gap, not a line between what was known before and after.
    "spanNulls": False,
}


def stat(
    title: str,
    description: str,
    expression: str,
    *,
    unit: str,
    when_empty: str,
    thresholds: Json | None = None,
    mappings: Sequence[Json] = (),
    decimals: int | None = None,
    links: Sequence[Json] = (),
) -> Json:
    """A tile with one number or word, as of now: of an engine that is gone it would go on telling the last one."""
    defaults: Json = {
        "color": {"mode": "thresholds"},
        "mappings": list(mappings),
        "noValue": when_empty,
        "thresholds": thresholds or steps(below="text"),
        "unit": unit,
    }
    if decimals is not None:
        defaults["decimals"] = decimals
    target = now("A", expression) | {"format": "time_series", "legendFormat": title}
    panel = _panel(
        "stat",
        title,
        description,
        [target],
        defaults=defaults,
        options={
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "center",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "value",
            "wideLayout": True,
        },
    )
    if links:
        panel["links"] = list(links)
    return panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One of a table.

    Attributes:
        of: a label, or the refId of a query, whose values it shows.
        title: what stands above it.
        width: in pixels, of a label with long values at least: those share what the others leave. A panel that is too narrow scrolls.
        coloured: whether its text has the colour of the threshold.
        links: where a click on a cell leads.
    """

    of: str
    title: str
    unit: str | None = None
    decimals: int | None = None
    width: int | None = None
    mappings: Sequence[Json] = ()
    thresholds: Json | None = None
    coloured: bool = False
    links: Sequence[Json] = field(default=())


def table(
    title: str,
    description: str,
    queries: Sequence[Json],
    columns: Sequence[Column],
    *,
    when_empty: str,
    sort_by: Sequence[tuple[str, Literal["up", "down"]]],
    hidden: Sequence[str] = (),
    links: Sequence[Json] = (),
) -> Json:
    """A table of what the queries have in common, one row for each set of labels.

    Args:
        title, description: as of every panel.
        queries: instants; their label sets must be the same, or one's those of the others and more.
        columns: in their order. Labels that are not named come last, e.g. somebody's `cluster`.
        when_empty: what stands there without a row.
        sort_by: titles of columns, and whether the smallest or the largest comes first.
        hidden: labels, or refIds, that are not shown.
        links: in the panel's menu.
    """
    refs = [target["refId"] for target in queries]

    def name(of: str) -> str:
        if of not in refs:
            return of
        return "Value" if len(refs) == 1 else f"Value #{of}"

    shown = [column.of for column in columns]
    left_out = [
        "Time",
        "job",
        "instance",
        *_OF_TARGETS,
        *hidden,
        *(ref for ref in refs if ref not in shown),
    ]
    panel = _panel(
        "table",
        title,
        description,
        queries,
        defaults={
            "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "minWidth": 60},
            "noValue": when_empty,
            "thresholds": steps(below="text"),
        },
        options={
            "cellHeight": "sm",
            "showHeader": True,
            "sortBy": [{"displayName": by, "desc": way == "down"} for by, way in sort_by],
        },
    )
    panel["transformations"] = [
        *([{"id": "merge", "options": {}}] if len(refs) > 1 else []),
        {
            "id": "organize",
            "options": {
                "excludeByName": {name(of): True for of in left_out if of not in shown},
                "indexByName": {name(column.of): i for i, column in enumerate(columns)},
                "renameByName": {name(column.of): column.title for column in columns},
            },
        },
    ]
    panel["fieldConfig"]["overrides"] = [
        # Else `when_empty` would stand in each empty cell.
        {"matcher": {"id": "byRegexp", "options": "/.*/"}, "properties": [{"id": "noValue", "value": "–"}]},
        *(
            override
            for column in columns
            if (override := _of_column(column, stretches=column.of not in (*refs, *_SHORT)))
        ),
    ]
    if links:
        panel["links"] = list(links)
    return panel


# Labels whose values are a few letters.
_SHORT = ("engine", "cache_tier", "severity", "xid", "edition")

# Labels that service discoveries add to a target; they say nothing about an engine.
_OF_TARGETS = ("container", "endpoint", "service", "node", "__name__")


def _of_column(column: Column, *, stretches: bool) -> Json | None:
    properties: list[Json] = []
    for key, value in (
        ("unit", column.unit),
        ("decimals", column.decimals),
        ("custom.minWidth" if stretches else "custom.width", column.width),
        ("mappings", list(column.mappings) or None),
        ("thresholds", column.thresholds),
        ("custom.cellOptions", {"type": "color-text"} if column.coloured else None),
        ("links", list(column.links) or None),
    ):
        if value is not None:
            properties.append({"id": key, "value": value})
    if column.thresholds is not None:
        properties.append({"id": "color", "value": {"mode": "thresholds"}})
    if not properties:
        return None
    return {"matcher": {"id": "byName", "options": column.title}, "properties": properties}


def timeline(
    title: str,
    description: str,
    queries: Sequence[Json],
    *,
    when_empty: str,
    texts: Mapping[int, str],
    colors: Sequence[Step],
    links: Sequence[Json] = (),
) -> Json:
    """A panel of one row per series, with a bar while it is there, and in the bar a word for its value."""
    defaults: Json = {
        # By thresholds the legend would have their numbers in place of the words.
        "color": {"mode": "palette-classic"},
        "custom": {"fillOpacity": 70, "lineWidth": 0, "spanNulls": False},
        "mappings": words(texts, colors),
        "noValue": when_empty,
        "thresholds": steps(below="text"),
        "unit": "short",
    }
    panel = _panel(
        "state-timeline",
        title,
        description,
        queries,
        defaults=defaults,
        options={
            "alignValue": "left",
            # A bar that is too narrow for its word has only its colour.
            "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom"},
            "mergeValues": True,
            "rowHeight": 0.8,
            "showValue": "auto",
            "tooltip": {"mode": "single", "sort": "none"},
        },
    )
    if links:
        panel["links"] = list(links)
    return panel


# --- layout ---

Line = tuple[int, Sequence[tuple[int, Json]]]
"""Panels beside each other: their height, and each with its width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Lines of panels under a heading.

    Attributes:
        title: without one there is no heading; only the first section may do without.
        collapsed: whether it is opened by a click only; Grafana asks nothing for it before.
    """

    title: str | None
    lines: Sequence[Line]
    collapsed: bool = False


def arranged(sections: Sequence[Section]) -> list[Json]:
    """All panels with ids and places, from top to bottom."""
    panels: list[Json] = []
    next_id, y = 1, 0
    for section in sections:
        into = panels
        if section.title is not None:
            row: Json = {
                "type": "row",
                "id": next_id,
                "title": section.title,
                "collapsed": section.collapsed,
                "gridPos": {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1},
                "panels": [],
            }
            next_id, y = next_id + 1, y + 1
            panels.append(row)
            if section.collapsed:
                into = row["panels"]
        top = y
        for height, placed in section.lines:
            x = 0
            for width, panel in placed:
                into.append({"id": next_id, "gridPos": {"x": x, "y": y, "w": width, "h": height}, **panel})
                next_id, x = next_id + 1, x + width
            y += height
        if section.collapsed:
            y = top  # what is folded away takes no room
    return panels


# --- variables, annotations, the whole ---


def datasource_variable() -> Json:
    """Which Prometheus is asked."""
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "regex": "",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "skipUrlSync": False,
    }


def label_variable(
    name: str,
    label: str,
    series: str,
    *,
    of_label: str,
    several: bool,
    all_value: str = ".+",
    sort: Literal[1, 3, 4] = 1,
    hidden: bool = False,
) -> Json:
    """The values of one label among some series.

    Args:
        name: as it is asked for.
        label: as people see it.
        series: the selector that they are among.
        of_label: which label.
        several: whether more than one, or all, may be chosen; all is then the default.
        all_value: the regular expression that "All" stands for.
        sort: 1 as words, 3 as numbers, 4 as numbers with the largest first.
        hidden: whether nobody is shown it.
    """
    query_text = f"label_values({series}, {of_label})"
    variable: Json = {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": query_text,
        "query": {"qryType": 1, "query": query_text, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "regex": "",
        "current": {},
        "hide": 2 if hidden else 0,
        "includeAll": several,
        "multi": several,
        "options": [],
        "refresh": 2,
        "skipUrlSync": False,
        "sort": sort,
    }
    if several:
        variable["allValue"] = all_value
        variable["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return variable


def annotation(name: str, expression: str, *, title: str, text: str, color: str, tags: str = "") -> Json:
    """A mark in every panel while the expression has series."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expression,
        "titleFormat": title,
        "textFormat": text,
        "tagKeys": tags,
        "useValueForTime": False,
    }


def dashboard(
    *,
    uid: str,
    title: str,
    description: str,
    variables: list[Json],
    annotations: list[Json],
    panels: list[Json],
) -> Json:
    """The whole document, as Grafana's import and provisioning take it."""
    return {
        # Grafana numbers what it imports; an id of ours could overwrite somebody's dashboard.
        "id": None,
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [TAG, "vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "",  # the reader's own
        "links": [_SIBLINGS, _STATUS_PAGE],
        "annotations": {"list": annotations},
        "templating": {"list": variables},
        "panels": panels,
    }


_SIBLINGS: Json = {
    "type": "dashboards",
    "title": "kvheadroom",
    "tags": [TAG],
    "asDropdown": False,
    "icon": "external link",
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
    "tooltip": "",
    "url": "",
}
_STATUS_PAGE: Json = {
    "type": "link",
    "title": "Status page",
    "tags": [],
    "asDropdown": False,
    "icon": "info",
    "includeVars": False,
    "keepTime": False,
    "targetBlank": True,
    "tooltip": "What the daemon says of each engine, with every sum",
    "url": "http://${daemon}/",
}
