"""The use of each column of an example file: what names and forms of columns suggest, or the keys that name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.config.synonyms import suggested_column
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.errors import ConfigError

SPOKEN = ("text", "messages", "null")
CANDIDATES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("messages", "null")),
    "prompt": (("prompt", "question"), SPOKEN),
    "response": (("completion", "response", "answer"), SPOKEN),
    "text": (("text",), ("text", "null")),
    "chosen": (("chosen",), SPOKEN),
    "rejected": (("rejected",), SPOKEN),
    "answers": (("answers", "responses", "completions"), ("texts", "conversations", "messages", "null")),
    "ranks": (("ranks",), ("numbers", "null")),
    "scores": (("scores",), ("numbers", "null")),
    "label": (("label",), ("boolean", "number", "text", "null")),
    "score": (("score", "reward", "rating"), ("number", "text", "null")),
    "margin": (("margin",), ("number", "numbers", "text", "null")),
    "tools": (("tools",), ("messages", "other", "texts", "text", "null")),
}
"""Use of a column -> (names that it may have, forms that it may have). A key may name a column of any name and form."""

NEEDED = {
    "conversation": ("messages",),
    "answer": ("prompt", "response"),
    "text": ("text",),
    "pair": ("chosen", "rejected"),
    "ranking": ("answers", "prompt"),
}
"""Shape of a row -> columns that it must have."""

OPTIONAL = {
    "conversation": ("tools",),
    "answer": ("tools",),
    "text": (),
    "pair": ("prompt", "margin", "tools"),
    "ranking": ("ranks", "scores", "margin", "tools"),
}

SHAPES: dict[str, tuple[str, ...]] = {
    "examples": ("conversation", "answer", "text"),
    "rankings": ("pair", "ranking"),
    "labelled": ("conversation", "answer", "pair"),
    "scored": ("conversation", "answer"),
}
"""Kind of records -> shapes of rows that they can be read from."""

JUDGED = {"labelled": "label", "scored": "score"}
"""Kind of records -> a further column that they need, unless they are read from pairs."""


@dataclass(frozen=True)
class Columns:
    """The columns that are read. shape: a key of `NEEDED`. names: use -> column. schema: its name, in words."""

    shape: str
    names: Mapping[str, str]
    schema: str

    def __str__(self) -> str:
        """For example "TRL's prompt-completion schema (prompt=prompt response=completion)"."""
        return f"{self.schema} ({' '.join(f'{use}={name}' for use, name in self.names.items())})"


def find_columns(path: str, forms: Mapping[str, str], options: ReadingOptions, kind: str) -> Columns:
    """How a file's rows are read for `kind` of records, a key of `SHAPES`; forms: column -> form.

    Raises ConfigError, with the keys to set, where a key names no column, where no columns fit and where two do.
    """
    given = {use: value for use in CANDIDATES if (value := getattr(options, f"{use}_key")) is not None}
    for use, name in given.items():
        if name not in forms:
            like = suggested_column(name, CANDIDATES[use][0], list(forms))
            nearest = f"; did you mean: {like}" if like is not None else ""
            raise ConfigError(f"{path} has no column {name!r} (data.{use}_key); it has {_listed(forms)}{nearest}")
    matches = {use: [given[use]] if use in given else _named(use, forms) for use in CANDIDATES}
    judge = JUDGED.get(kind)
    shapes = [
        shape
        for shape in SHAPES[kind]
        if all(matches[use] for use in NEEDED[shape]) and (judge is None or shape == "pair" or matches[judge])
    ]
    asked = [shape for shape in shapes if set(NEEDED[shape]) & set(given)]
    if judge is not None and matches[judge] and len(shapes) > 1:
        shapes = [shape for shape in shapes if shape != "pair"]
    shapes = asked or shapes
    if not shapes:
        raise ConfigError(_nothing_fits(path, forms, kind))
    if len(shapes) > 1:
        choices = [
            " ".join(f"data.{use}_key={matches[use][0]}" for use in NEEDED[shape] if len(matches[use]) == 1)
            or f"data.{NEEDED[shape][0]}_key"
            for shape in shapes
        ]
        raise ConfigError(
            f"{path} can be read in {len(shapes)} ways, as its columns are {_listed(forms)}: set "
            + ", or ".join(choices)
        )
    (shape,) = shapes
    wanted = [*NEEDED[shape], *OPTIONAL[shape], *([judge] if judge is not None and shape != "pair" else [])]
    names = {use: _one(path, use, matches[use]) for use in wanted if matches[use]}
    if "ranks" in names and "scores" in names:
        if "margin" not in given or given["margin"] != names["scores"]:
            raise ConfigError(
                f"{path} has ranks ({names['ranks']}) and scores ({names['scores']}) of its responses, and they could "
                f"differ: set data.ranks_key={names['ranks']} and data.margin_key={names['scores']} for the order of "
                "the responses and margins from the scores, or take a column out"
            )
        del names["scores"]
    return Columns(shape, names, _schema(shape, names, judge))


def _named(use: str, forms: Mapping[str, str]) -> list[str]:
    names, allowed = CANDIDATES[use]
    return [name for name in names if forms.get(name) in allowed]


def _one(path: str, use: str, names: list[str]) -> str:
    if len(names) > 1:
        keys = " or ".join(f"data.{use}_key={name}" for name in names)
        raise ConfigError(f"{path}: the columns {' and '.join(names)} could both be the {use}: set {keys}")
    return names[0]


def _listed(forms: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({form})" for name, form in forms.items()) or "no columns"


def _nothing_fits(path: str, forms: Mapping[str, str], kind: str) -> str:
    judge = JUDGED.get(kind)
    ways = []
    for shape in SHAPES[kind]:
        uses = [*NEEDED[shape], *([judge] if judge is not None and shape != "pair" else [])]
        ways.append(" with ".join(" or ".join(CANDIDATES[use][0]) for use in uses))
    text = f"{path} has no columns for this: it has {_listed(forms)}, and needs {'; or '.join(ways)}"
    keys = [f"data.{use}_key" for shape in SHAPES[kind] for use in NEEDED[shape]]
    keys += [f"data.{judge}_key"] if judge is not None else []
    hints: list[tuple[bool, str]] = [
        ("turns" in forms.values(), "turns of {from, value} must be messages of {role, content}: rename the fields"),
        (
            kind == "examples" and {"chosen", "rejected"} <= set(forms),
            "chosen and rejected are for `reward` and `dpo`; to train on the chosen responses set "
            "data.response_key=chosen, "
            "or data.messages_key=chosen where they are whole conversations",
        ),
        (True, f"other names are given by {', '.join(dict.fromkeys(keys))}"),
    ]
    return "; ".join([text, *(hint for holds, hint in hints if holds)])


def _schema(shape: str, names: Mapping[str, str], judge: str | None) -> str:
    trl = names.get("response") == "completion"
    whose: dict[str, Callable[[], str]] = {
        "conversation": lambda: "conversations, TRL's and verl's schema",
        "answer": lambda: "TRL's prompt-completion schema" if trl else "verl's schema of prompts and responses",
        "text": lambda: "plain text",
        "pair": lambda: f"TRL's preference schema, prompt {'in a column' if 'prompt' in names else 'in both answers'}",
        "ranking": lambda: (
            "ranked responses, by their "
            + ("ranks" if "ranks" in names else "scores" if "scores" in names else "order, the best first")
        ),
    }
    if judge == "label" and shape != "pair":
        return "TRL's unpaired preference schema" if trl else "labelled responses"
    return whose[shape]() + (", with scores" if judge == "score" else "")
