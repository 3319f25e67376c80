"""megatron-rl families | features: what each model family can do, and which features go with which."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from megatron_rl.cli.options import AsJson
from megatron_rl.cli.output import print_json, refuse_to_lose_output, say
from megatron_rl.observe.terminal import Terminal
from megatron_rl.planning.family_table import CHAT_COLUMNS, COLUMNS, family_rows, refused_rows
from megatron_rl.planning.feature_rows import FEATURES
from megatron_rl.planning.feature_table import as_json as rows_as_json
from megatron_rl.planning.feature_table import feature_lines


def families_command(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Print the model families and what works with each, with the reason where something does not."""
    refuse_to_lose_output()
    rows, refused = family_rows(), refused_rows()
    if as_json:
        families = {
            row.architecture: {column: row.lacks.get(column, True) for column in COLUMNS} | asdict(row.chat)
            for row in rows
        }
        print_json({"families": families, "refused": [asdict(refusal) for refusal in refused]})
        return
    console, width = Terminal(), max(len(row.architecture) for row in rows)
    columns = (*COLUMNS, *CHAT_COLUMNS)
    widths = [max(3, len(column), *(len(row.cells()[n]) for row in rows)) for n, column in enumerate(columns)]
    for name, cells in (("", columns), *((row.architecture, row.cells()) for row in rows)):
        lacks = next((row.lacks for row in rows if row.architecture == name), {})
        padded = (cell.ljust(size) for cell, size in zip(cells, widths, strict=True))
        say(" ".join([name.ljust(width), *padded]).rstrip(), console)
        for column, why in lacks.items():
            say(f"    {column}: {why}", console)
    say("Refused by name, where no family above fits:", console)
    for refusal in refused:
        near = f"; try: {refusal.nearest}" if refusal.nearest else ""
        say(f"    {refusal.pattern} needs {refusal.needs}{near}", console)


def features_command(as_json: AsJson = False) -> None:
    """Print every feature: its keys, its needs, the features that exclude it and why, and where it has run."""
    refuse_to_lose_output()
    if as_json:
        print_json({"features": rows_as_json(FEATURES.values())})
        return
    console = Terminal()
    for line in feature_lines(FEATURES.values()):
        say(line, console)
