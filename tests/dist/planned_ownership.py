"""What ranks own of a role, beside what the memory plan says."""

from __future__ import annotations

SIZES = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 256}


def owned_otherwise_than_planned(
    ledger: dict[str, dict[str, int]], phases: dict[str, dict[str, int]], most: int = 1024
) -> list[str]:
    """Entries of the ledger that are not the plan's, up to the ends of buffers and the cache's last block."""
    found = []
    for phase, owned in ledger.items():
        for name, size in owned.items():
            planned = phases[phase].get(name, 0)
            missing = name in ("actor moments", "critic moments") and size == 0  # before the first update
            counters = 1024 * name.endswith("masters")  # of Adam's steps, one for each parameter
            if abs(size - planned) > max(most, counters) + 0.15 * planned * (name == "KV cache") and not missing:
                found.append(f"{phase}: {name} is {size}, planned {planned}")
    return found
