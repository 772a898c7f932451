"""Numbers of bytes for people."""


def in_bytes(count: int) -> str:
    """Return a number of bytes with its unit, powers of 1024: `1.5 MiB`."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
