"""The few pieces of Grafana's classic dashboard JSON that the dashboard is made of."""

from typing import Any, Literal

Json = dict[str, Any]

SCHEMA_VERSION = 39
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
GRID_COLUMNS = 24

# Dashes and fill tell lines apart where colour does not.
DASHED: Json = {"lineStyle": {"fill": "dash", "dash": [8, 6]}}
DOTTED: Json = {"lineStyle": {"fill": "dot", "dash": [0, 8]}}


def query(ref_id: str, expression: str, legend: str) -> Json:
    """One PromQL of a panel."""
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expression,
        "legendFormat": legend,
        "range": True,
        "refId": ref_id,
    }


def look(matcher: str, of: str, custom: Json) -> Json:
    """An override of how some lines are drawn, e.g. `byFrameRefID` and `A`."""
    return {
        "matcher": {"id": matcher, "options": of},
        "properties": [{"id": f"custom.{key}", "value": value} for key, value in custom.items()],
    }


def time_series(
    panel_id: int,
    *,
    title: str,
    description: str,
    queries: list[Json],
    unit: str,
    when_empty: str,
    place: Json,
    decimals: int | None = None,
    lowest: float | None = 0,
    highest: float | None = None,
    calcs: tuple[str, str] = ("lastNotNull", "max"),
    first: Literal["highest", "lowest", "as asked"] = "highest",
    custom: Json | None = None,
    overrides: list[Json] | None = None,
    min_interval: str | None = None,
) -> Json:
    """A panel of lines over time with a table of its lines below.

    Args:
        when_empty: what stands in the panel when the queries have no series.
        lowest, highest: fixed ends of the y axis.
        calcs: the columns of the table.
        first: which line the table begins with, by its first column.
        custom: how lines are drawn, where it differs from the plain line.
        min_interval: shortest time between two points.
    """
    defaults: Json = {
        "color": {"mode": "palette-classic"},
        "custom": {**_PLAIN_LINE, **(custom or {})},
        "noValue": when_empty,
        "thresholds": {"mode": "absolute", "steps": [{"color": "green", "value": None}]},
        "unit": unit,
    }
    for key, value in (("decimals", decimals), ("min", lowest), ("max", highest)):
        if value is not None:
            defaults[key] = value
    legend: Json = {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": list(calcs)}
    if first != "as asked":
        legend |= {"sortBy": _COLUMN[calcs[0]], "sortDesc": first == "highest"}
    panel: Json = {
        "id": panel_id,
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": overrides or []},
        "options": {
            "legend": legend,
            "tooltip": {"mode": "multi", "sort": "asc" if first == "lowest" else "desc"},
        },
        "targets": queries,
    }
    if min_interval is not None:
        panel["interval"] = min_interval
    return panel


# What Grafana's legend table calls its columns; it sorts by these words.
_COLUMN = {"lastNotNull": "Last *", "max": "Max", "min": "Min"}

_PLAIN_LINE: Json = {
    "drawStyle": "line",
    "lineInterpolation": "linear",
    "lineWidth": 2,
    "fillOpacity": 0,
    "showPoints": "auto",
    # Numbers that the exporter withheld are a gap, not a line between what was known before and after.
    "spanNulls": False,
}


def timeline(
    panel_id: int, *, title: str, description: str, queries: list[Json], when_empty: str, place: Json
) -> Json:
    """A panel of one row per series, with a bar while it is there. Its value is 1 or absent."""
    return {
        "id": panel_id,
        "type": "state-timeline",
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "color": {"mode": "palette-classic"},
                "custom": {"fillOpacity": 70, "lineWidth": 0, "spanNulls": False},
                "mappings": [{"type": "value", "options": {"1": {"text": "yes", "index": 0}}}],
                "noValue": when_empty,
                "thresholds": {"mode": "absolute", "steps": [{"color": "green", "value": None}]},
                "unit": "short",
            },
            "overrides": [],
        },
        "options": {
            "alignValue": "left",
            # The name of each row says it all.
            "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom"},
            "mergeValues": True,
            "rowHeight": 0.8,
            "showValue": "never",
            "tooltip": {"mode": "single", "sort": "none"},
        },
        "targets": queries,
    }


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
    name: str, label: str, series: str, *, of_label: str, several: bool, all_value: str = ".+", sort: int = 1
) -> Json:
    """The values of one label among some series.

    Args:
        several: whether more than one, or all, may be chosen; all is then the default.
        all_value: the regular expression that "All" stands for.
        sort: 1 as words, 3 as numbers.
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
        "hide": 0,
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


def annotation(name: str, expression: str, *, title: str, text: str, color: str) -> Json:
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
        "tagKeys": "severity",
        "useValueForTime": False,
    }


def dashboard(
    *,
    uid: str,
    title: str,
    description: str,
    tags: list[str],
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
        "tags": tags,
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "",  # the reader's own
        "links": [],
        "annotations": {"list": annotations},
        "templating": {"list": variables},
        "panels": panels,
    }
