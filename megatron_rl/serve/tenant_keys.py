"""The keys of a service's tenants: a file that only its owner may read, a line `NAME KEY` for each."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.errors import ConfigError

KEY_START = "tml-"
"""The SDK sends no key that begins otherwise."""
SHORTEST_KEY = 16
TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")


def read_keys(path: Path) -> Mapping[str, str]:
    """Digest of a key -> its tenant. Raises ConfigError, without a key in its text."""
    try:
        mode, lines = path.stat().st_mode, path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--keys {path} cannot be read: {error}; try: a file with a line `NAME {KEY_START}...`"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--keys {path} has mode {mode & 0o777:o}, so that others can read it; try: chmod 600 {path}")
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) != 2 or TENANT.fullmatch(parts[0]) is None:
            raise ConfigError(f"--keys {path}, line {number}: it must be `NAME KEY`, with a name of letters and digits")
        name, key = parts
        if not key.startswith(KEY_START) or len(key) < SHORTEST_KEY:
            rule = f"a key begins with {KEY_START} and has at least {SHORTEST_KEY} characters; this one has {len(key)}"
            raise ConfigError(f"--keys {path}, line {number}: {rule}")
        if found.setdefault(key_digest(key), name) != name:
            raise ConfigError(f"--keys {path}, line {number}: {name} has the key of {found[key_digest(key)]}")
    if not found:
        raise ConfigError(f"--keys {path} has no key; try: a line `NAME {KEY_START}...`")
    return found


def key_digest(key: str) -> str:
    """What is compared instead of a key."""
    return hashlib.sha256(key.encode()).hexdigest()
