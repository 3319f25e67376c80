"""URLs of the configuration: what is wrong with one, and how it is shown, without the secrets that it may carry."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"([?&;#][^=&;#\s]*=)[^&;#\s]+")
_BARE_QUERY = re.compile(r"([?#])[^=&;#\s]+(?=$|[&;#\s])")
_SECRET_KEY = re.compile(r"^token$|(^|_|-)(password|passwd|secret|api_?key|(access|auth|api|hf)_token)$", re.IGNORECASE)


def url_fault(url: str) -> str | None:
    """Return why a text is no http URL with a host, as the rest of a sentence; None for one that can be asked."""
    if not url.isascii() or not url.isprintable() or " " in url:
        return "has spaces or other characters that a URL writes as %XX"
    try:
        parts = urlsplit(url)
        if parts.port == 0:
            return "names port 0, which cannot be used"
    except ValueError:  # its text has parts of the URL
        return "has another port than a number up to 65535, or a [ without a ]"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    return None if parts.hostname else "names no host"


def shown_url(text: str) -> str:
    """Return a text with the URLs in it as they may be printed: no user, no password, no values of the query."""
    if "://" not in text:
        return text
    text = _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))
    return _BARE_QUERY.sub(rf"\1{HIDDEN}", text)


def without_secrets(value: Any) -> Any:
    """Return a copy of nested settings that others may read: URLs as `shown_url`, and no texts of keys for secrets."""
    if isinstance(value, str):
        return shown_url(value)
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(inner, str) and _SECRET_KEY.search(str(key)) else without_secrets(inner)
            for key, inner in value.items()
        }
    return [without_secrets(inner) for inner in value] if isinstance(value, list | tuple) else value
