"""Lengths of time in kubectl's words."""

from __future__ import annotations


def age(seconds: float) -> str:
    """Return a length of time as kubectl writes it: 45s, 5m3s, 62m, 3h5m, 26h, 3d4h."""
    s = int(max(0.0, seconds))
    minutes, hours, days = s // 60, s // 3600, s // 86400
    if s < 120:
        return f"{s}s"
    if minutes < 10:
        return f"{minutes}m{s % 60}s" if s % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if days < 8 and hours % 24:
        return f"{days}d{hours % 24}h"
    return f"{days}d"
