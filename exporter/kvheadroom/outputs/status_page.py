"""The status page at `/`: predicted, observed, difference, usage, headroom, and what is assumed or missing."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvheadroom import __version__
from kvheadroom.capacity.assessment import FleetAssessment, is_stale

GIB = 1024**3
MIB = 1024**2


def render_page(fleet: FleetAssessment, now: float, notice: str | None) -> str:
    """The page as HTML.

    Args:
        fleet: with stale numbers already withheld.
    """
    return _TEMPLATE.render(fleet=fleet, now=now, notice=notice, version=__version__, is_stale=is_stale)


def count(value: float | None) -> str:
    """`1,234`; at most two decimals where the number is no whole one; a dash where it is not known."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def signed(value: float | None) -> str:
    """`+1,234`, `-5`, `0`."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{'+' if value > 0 else '-'}{count(abs(value))}"


def percent(value: float | None) -> str:
    """A ratio as a percentage with one decimal."""
    return "–" if value is None else f"{value * 100:.1f} %"


def signed_percent(value: float | None) -> str:
    """A ratio as a signed percentage with two decimals."""
    return "–" if value is None else f"{value * 100:+.2f} %"


def size(value: float | None) -> str:
    """Bytes as GiB, MiB or bytes: binary units, said so."""
    if value is None:
        return "–"
    if abs(value) >= GIB:
        return f"{value / GIB:,.2f} GiB"
    return f"{value / MIB:,.2f} MiB" if abs(value) >= MIB else f"{value:,.0f} B"


def seconds(value: float | None) -> str:
    """A duration or an age."""
    if value is None:
        return "never"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.0f} s"


def usage_word(ratio: float | None) -> str:
    """The usage in a word, so that the bar's colour is not the only sign. A reading aid, no alert."""
    if ratio is None:
        return "not known"
    return "nearly full" if ratio >= 0.9 else "filling" if ratio >= 0.7 else "room left"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvheadroom.outputs", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "count": count,
        "signed": signed,
        "percent": percent,
        "signed_percent": signed_percent,
        "size": size,
        "seconds": seconds,
        "usage_word": usage_word,
    }
    environment.filters.update(filters)
    return environment


_TEMPLATE = _environment().get_template("status.html")
