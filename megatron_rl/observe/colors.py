"""Colours of text and lines in pictures, and the contrast between two colours."""

from __future__ import annotations

INK, LABEL, FAINT = "#1f2933", "#52606d", "#9aa5b1"
"""Text; names of axes, lighter than text; lines of grids and axes, too light for text."""
WHITE = "#ffffff"
READABLE = 4.5
"""Least contrast of text with what is behind it (WCAG 2.2, level AA)."""


def luminance(color: str) -> float:
    """Return the relative luminance of #rrggbb by WCAG 2.2: 0 is black, 1 is white."""
    shares = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2.2, from 1 (equal) to 21 (black and white)."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def text_color(background: str) -> str:
    """Return the colour, white or `INK`, that is easier to read on a background. Its contrast may be below 4.5."""
    return max((WHITE, INK), key=lambda color: contrast(color, background))
