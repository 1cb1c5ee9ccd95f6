"""Numbers as a person reads them, for the page and the terminal."""

GIB = 1024**3
MIB = 1024**2
GB = 10**9


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


def gigabytes(value: float) -> str:
    """Bytes as makers of memory count them: `191.51 GB`, `80 GB`."""
    return f"{round(value / GB, 2):,g} GB"


def signed_size(value: float) -> str:
    """A difference of bytes: `+1.25 GiB`, `-12 B`, `0`."""
    return "0" if value == 0 else f"{'+' if value > 0 else '-'}{size(abs(value))}"


def span(value: float | None) -> str:
    """How long something lasts, by the unit that fits: `3.5 s`, `45 min`, `2.1 h`, `3 days`."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    for least, unit, name in ((2 * 86_400, 86_400, "days"), (7_200, 3_600, "h"), (120, 60, "min")):
        if value >= least:
            return f"{value / unit:,.{'3g' if value < 999.5 * unit else '0f'}} {name}"
    return f"{value:.3g} s"


def seconds(value: float | None) -> str:
    """A duration or an age."""
    if value is None:
        return "never"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.0f} s"
