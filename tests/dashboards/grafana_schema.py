"""Keys of Grafana's classic dashboard JSON (schema version 39) and units of it, as far as the dashboards use them.

Grafana drops what it does not know without a word, so a key with a typo would only be missed by the eye.
"""

from typing import Any

from tests.dashboards.expressions import Json

UNITS = {"short", "percentunit", "s", "bytes", "binBps", "locale", "dateTimeAsIso"}

_DATASOURCE = {"type": str, "uid": str}
_LINK = {"title": str, "url": str, "targetBlank": bool}
_THRESHOLDS = {"mode": str, "steps": [{"color": str, "value": float}]}
_ANY: dict[str, Any] = {}
_CUSTOM = {
    "align": str,
    "axisCenteredZero": bool,
    "axisSoftMax": float,
    "axisSoftMin": float,
    "cellOptions": {"type": str},
    "drawStyle": str,
    "fillOpacity": int,
    "lineInterpolation": str,
    "lineStyle": {"fill": str, "dash": [int]},
    "lineWidth": int,
    "minWidth": int,
    "width": int,
    "showPoints": str,
    "spanNulls": bool,
    "stacking": {"group": str, "mode": str},
    "thresholdsStyle": {"mode": str},
}
_DEFAULTS = {
    "color": {"mode": str},
    "decimals": int,
    "mappings": [{"type": str, "options": _ANY}],
    "max": float,
    "min": float,
    "noValue": str,
    "thresholds": _THRESHOLDS,
    "unit": str,
    "custom": _CUSTOM,
}
_OPTIONS = {
    # time series, state timeline
    "legend": {"showLegend": bool, "displayMode": str, "placement": str, "calcs": [str]},
    "tooltip": {"mode": str, "sort": str},
    "alignValue": str,
    "mergeValues": bool,
    "rowHeight": float,
    "showValue": str,
    # stat
    "colorMode": str,
    "graphMode": str,
    "justifyMode": str,
    "orientation": str,
    "reduceOptions": {"calcs": [str], "fields": str, "values": bool},
    "textMode": str,
    "wideLayout": bool,
    # table
    "cellHeight": str,
    "showHeader": bool,
    "sortBy": [{"displayName": str, "desc": bool}],
}
_PANEL: dict[str, Any] = {
    "collapsed": bool,
    "datasource": _DATASOURCE,
    "description": str,
    "fieldConfig": {
        "defaults": _DEFAULTS,
        "overrides": [
            {"matcher": {"id": str, "options": str}, "properties": [{"id": str, "value": object}]},
        ],
    },
    "gridPos": {"x": int, "y": int, "w": int, "h": int},
    "id": int,
    "interval": str,
    "links": [_LINK],
    "options": _OPTIONS,
    "targets": [
        {
            "datasource": _DATASOURCE,
            "editorMode": str,
            "expr": str,
            "format": str,
            "instant": bool,
            "legendFormat": str,
            "range": bool,
            "refId": str,
        }
    ],
    "title": str,
    "transformations": [
        {"id": str, "options": {"excludeByName": _ANY, "indexByName": _ANY, "renameByName": _ANY}}
    ],
    "type": str,
}
_PANEL["panels"] = [_PANEL]
_DASHBOARD = {
    "annotations": {
        "list": [
            {
                "datasource": _DATASOURCE,
                "enable": bool,
                "expr": str,
                "hide": bool,
                "iconColor": str,
                "name": str,
                "tagKeys": str,
                "textFormat": str,
                "titleFormat": str,
                "useValueForTime": bool,
            }
        ]
    },
    "description": str,
    "editable": bool,
    "graphTooltip": int,
    "id": int,
    "links": [
        {
            "asDropdown": bool,
            "icon": str,
            "includeVars": bool,
            "keepTime": bool,
            "tags": [str],
            "targetBlank": bool,
            "title": str,
            "tooltip": str,
            "type": str,
            "url": str,
        }
    ],
    "panels": [_PANEL],
    "refresh": str,
    "schemaVersion": int,
    "tags": [str],
    "templating": {
        "list": [
            {
                "allValue": str,
                "current": _ANY,
                "datasource": _DATASOURCE,
                "definition": str,
                "hide": int,
                "includeAll": bool,
                "label": str,
                "multi": bool,
                "name": str,
                "options": [str],
                "query": object,
                "refresh": int,
                "regex": str,
                "skipUrlSync": bool,
                "sort": int,
                "type": str,
            }
        ]
    },
    "time": {"from": str, "to": str},
    "timepicker": _ANY,
    "timezone": str,
    "title": str,
    "uid": str,
    "version": int,
}
# Properties of an override are paths of the defaults.
_PROPERTIES = {*_DEFAULTS, "links", *(f"custom.{key}" for key in _CUSTOM)}


def unknown_keys(document: Json) -> list[str]:
    """Paths of keys that are not Grafana's, and of values of another type."""
    return _unknown(document, _DASHBOARD, "")


def _unknown(value: Any, known: Any, path: str) -> list[str]:
    if known is object or known is _ANY or value is None:
        return []
    if isinstance(known, dict):
        if not isinstance(value, dict):
            return [path.lstrip(".")]
        found = []
        for key, inner in value.items():
            if key not in known:
                found.append(f"{path}.{key}".lstrip("."))
            else:
                found += _unknown(inner, known[key], f"{path}.{key}")
        if path.endswith("]") and value.keys() == {"id", "value"} and value["id"] not in _PROPERTIES:
            found.append(f"{path}.id: {value['id']}".lstrip("."))
        return found
    if isinstance(known, list):
        if not isinstance(value, list):
            return [path.lstrip(".")]
        return [wrong for i, inner in enumerate(value) for wrong in _unknown(inner, known[0], f"{path}[{i}]")]
    fits = isinstance(value, int | float) if known is float else isinstance(value, known)
    return [] if fits else [path.lstrip(".")]
