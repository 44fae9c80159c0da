"""Numbers as the console writes them: short, with their unit, "?" for what is not known."""

UNKNOWN = "?"


def count(value):
    """1234567 -> "1,234,567"."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def short(value):
    """At most five characters: 950, 12.3k, 1.05M, 131k."""
    if value is None:
        return UNKNOWN
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * (0.9995 if size > 1e3 else 1):
            return f"{_three(value / size)}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else _three(value)


def _three(value):
    """Three digits."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def size(value):
    """Bytes: "0 B", "12.3 MiB"."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{_three(value)} {unit}"
        value /= 1024


def rate(value, unit="tok/s"):
    """"12.3 tok/s"."""
    return f"{UNKNOWN if value is None else short(value)} {unit}"


def span(seconds):
    """Time: "0.4 s", "12 s", "3 min 05 s", "2 h 10 min", "3 d 4 h"."""
    if seconds is None:
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def percent(part, whole):
    """"42 %"."""
    return f"{UNKNOWN} %" if part is None or not whole else f"{100 * part / whole:.0f} %"
