"""Make the pages of docs/reference that list what the package declares, and tables of three other pages.

    python scripts/reference_pages.py [--check]

Each page is made from one table of the package and is never edited by hand. --check ends with exit code 1 and names the
pages that are not current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from marked_tables import with_tables

from megatron_rl.cli import app
from megatron_rl.columns import COLUMNS
from megatron_rl.config.key_table import DocumentedKey, key_table
from megatron_rl.config.presets import PRESETS, PresetRow
from megatron_rl.config.verl_compat.key_rows import KeyRow, table
from megatron_rl.data.row_problems import KINDS
from megatron_rl.errors import shown
from megatron_rl.observe.metric_names import GROUPS
from megatron_rl.planning.family_table import CHAT_COLUMNS, family_rows, refused_rows
from megatron_rl.planning.family_table import COLUMNS as ABILITIES
from megatron_rl.planning.feature_rows import FEATURES
from megatron_rl.planning.feature_table import conditions, partners, proof

README = Path(__file__).parents[1] / "README.md"
FOLDER = README.parent / "docs/reference"
AUDIT = README.parent / "docs/internals/gpu_audit.md"
DATA = README.parent / "docs/train/data.md"
SUPPORTED = "supported models"
PUBLISHED = {
    "DeepseekV2": "DeepSeek-V2",
    "DeepseekV3": "DeepSeek-V3, Kimi-K2",
    "Gemma2": "Gemma-2",
    "Gemma3": "Gemma-3",
    "Gemma3ForConditionalGeneration": "Gemma-3 with vision (text)",
    "Gemma4": "Gemma-4",
    "Glm4Moe": "GLM-4.5 to 4.7",
    "Glm4MoeLite": "GLM-4.7-Flash",
    "GptOss": "gpt-oss",
    "MiniMaxM2": "MiniMax-M2",
    "Qwen2": "Qwen2, Qwen2.5",
    "Qwen2Moe": "Qwen1.5-MoE, Qwen2-MoE",
    "Qwen2_5_VL": "Qwen2.5-VL",
    "Qwen3Moe": "Qwen3-MoE",
    "Qwen3Next": "Qwen3-Next",
    "Qwen3VL": "Qwen3-VL",
    "Qwen3VLMoe": "Qwen3-VL-MoE",
    "Qwen3_5": "Qwen3.5",
    "Qwen3_5Moe": "Qwen3.5-MoE",
}
"""Architecture, without its task -> names under which its models are published, where they differ."""
MADE = "<!-- Made by scripts/reference_pages.py. Do not edit. -->"


def page(title: str, introduction: str, *parts: str) -> str:
    """Return a whole page: title, one paragraph, parts."""
    return "\n\n".join([f"# {title}", MADE, introduction, *parts]) + "\n"


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a markdown table; a bar within a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def code(text: str) -> str:
    """Return the text as code."""
    return f"`{text}`"


def metrics_page() -> str:
    """Return every metric with its unit."""
    sections = [
        f"## {heading}\n\n{table_of(('metric', 'unit', 'what'), ((code(m.name), m.unit, m.text) for m in metrics))}"
        for heading, metrics in GROUPS.items()
    ]
    return page(
        "Metrics",
        "What a run logs for each step, in `metrics.jsonl`, TensorBoard, W&B and every other tracker. Names are verl's "
        "where verl has the metric. `{a|b}` stands for one of these texts, `{x}` for one that depends on the run. "
        "Metrics of a part that a run does not have are absent.",
        *sections,
    )


def columns_page() -> str:
    """Return the columns of a batch."""
    rows = (
        (code(column.name), f"{column.dtype}, per {column.shape}", column.text, column.maker, ", ".join(column.readers))
        for column in COLUMNS.built_in
    )
    return page(
        "Columns of a batch",
        "A batch is a table of named tensors, and of lists (`object`), which `objects(name)` returns. This is what "
        "each column holds, who fills it, and who reads it. A user's scorer declares its own with `COLUMNS.declare`. "
        "`megatron-rl columns` prints the same, with what the configured estimator and loss read.",
        table_of(("column", "type", "what", "filled by", "read by"), rows),
    )


def support_page() -> str:
    """Return the model families and what works with each."""
    rows = family_rows()
    abilities = ((code(row.architecture), *row.cells()[: len(ABILITIES)]) for row in rows)
    chats = ((code(row.architecture), *row.cells()[len(ABILITIES) :]) for row in rows)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for column, why in row.lacks.items():
            reasons.setdefault(f"{column}: {why}", []).append(row.architecture)
    why = [f"- {reason}: {', '.join(map(code, names))}" for reason, names in sorted(reasons.items())]
    refused = ((code(r.pattern), r.needs, code(r.nearest) if r.nearest else "-") for r in refused_rows())
    return page(
        "Supported models",
        "Model families by the `architectures` of their config.json, and what works with each: tensor (TP), pipeline "
        "(PP), expert (EP) and context parallelism (CP), generation, export to a Hugging Face folder. "
        "`megatron-rl families --json` prints the same for programs. How to use a model: "
        "[Models](../scale/models.md).",
        table_of(("family", *ABILITIES), abilities),
        "## Why not\n\n" + "\n".join(why),
        "## Chat formats\n\n`turns`: a conversation grows by appending (`append`), or its template rewrites earlier "
        "turns (`own`). `thoughts`: the mark of reasoning. `tools`: parsers of tool calls.",
        table_of(("family", *CHAT_COLUMNS), chats),
        "## Refused by name\n\nAn architecture that no family fits ends the run before it starts, with this reason.",
        table_of(("architecture", "needs", "nearest family"), refused),
    )


def supported_table() -> str:
    """Return README's table: models with the same abilities in one row, and what works with them."""
    shared = [column for column in ABILITIES if any(column in row.lacks for row in family_rows())]
    models: dict[tuple[str, ...], list[str]] = {}
    for row in family_rows():
        name = re.sub(r"For(CausalLM|ConditionalGeneration)$", "", row.architecture)
        cells = tuple("no" if column in row.lacks else "yes" for column in shared)
        published = PUBLISHED.get(row.architecture) or PUBLISHED.get(name, name)
        models.setdefault(cells, []).append(published)
    rows = ((", ".join(dict.fromkeys(names)), *cells) for cells, names in sorted(models.items(), reverse=True))
    return table_of(("models", *shared), rows)


def not_supported_page() -> str:
    """Return what of verl's is refused by name."""
    rows = [row for row in table() if row.feature]
    return page(
        "Not supported",
        "What verl's configuration can ask for and this project refuses by name, with exit code 2 (`port`: 3). A "
        "feature that is in no list is reported as an unknown key. `<ROLE>` stands for the keys of actor, reference, "
        "critic and reward model, `<TRAINED>` for actor and critic, `<MODEL>` for a role's model. Models: "
        "[Supported models](support.md).",
        table_of(("key of verl", "feature", "what to do"), map(refused_cells, rows)),
        "What is refused on GPUs, because no GPU has run it: [Features](features.md).",
    )


def features_page() -> str:
    """Return the features of a run, and which go together."""
    rows = (
        (
            row.text,
            ", ".join(code(f"{key}={shown(value)}") for key, value in row.turned_on.items()),
            "; ".join(conditions(row)) or "-",
            "; ".join(f"{FEATURES[name].text}: {why}" for name, why in partners(row).items()) or "-",
            proof(row),
        )
        for row in FEATURES.values()
    )
    return page(
        "Features",
        "The features of a run by the keys that turn them on, their needs, and the features that exclude them, with "
        "the reason. `megatron-rl features` prints the same, `megatron-rl plan --features` the rows of a run. A run "
        "with two features that do not go together ends before it starts, with both keys and a way out. "
        "`trainer.allow_unproven=true` allows a feature where no run has shown it; "
        "[prefix-tree training](../scale/batching.md#prefix-tree-training) of some kinds of attention is refused on "
        "GPUs in any case. `<ROLE>` stands for the keys of a role, such as `actor_rollout_ref.actor`.",
        table_of(("feature", "turned on by", "needs", "does not go with", "proof"), rows),
    )


def refused_cells(row: KeyRow) -> tuple[str, str, str]:
    """Return a row of the page: keys, what they ask for, the way out."""
    return ", ".join(map(code, row.keys)), row.feature or "", row.instead or row.why or "-"


def keys_page() -> str:
    """Return every key of the configuration, a section for each of its groups."""
    groups: dict[str, list[DocumentedKey]] = {}
    for row in key_table():
        groups.setdefault(row.key.rpartition(".")[0], []).append(row)
    sections = [f"## {group}\n\n{table_of(KEY_HEADS, map(key_cells, rows))}" for group, rows in groups.items()]
    return page(
        "Configuration keys",
        "Every key of a run's YAML file, and of `key=value` on the command line. `verl`: the key is verl's, with its "
        "meaning; `ours`: verl has none. Batch sizes count prompts, and those with `per_gpu` samples of one "
        "data-parallel rank. A default `as KEY` is the value of that key until it is set; an empty one must be set.",
        *sections,
    )


KEY_HEADS = ("key", "type", "default", "whose", "what")


def key_cells(row: DocumentedKey) -> tuple[str, ...]:
    """Return a row of the page: the key's last part, type, default, whose it is, what it does."""
    text = row.text or f"As `{row.same_as}`."
    default = code(row.default) if row.default else ""
    return code(row.key.rpartition(".")[2]), row.type, default, row.whose, " ".join(text.split())


def cli_page() -> str:
    """Return every command with its options."""
    program: Any = typer.main.get_command(app)
    context = typer.Context(program, info_name="megatron-rl")
    sections = []
    for name, command in program.commands.items():
        rows = [option_cells(option) for option in command.params if option.name != "help"]
        usage = " ".join(["megatron-rl", name, *command.collect_usage_pieces(context)])
        options = [table_of(("option", "what", "default"), rows)] if rows else []
        text = re.sub(r"\n(?!\n)", " ", (command.help or "").strip())
        sections.append("\n\n".join([f"## {name}", text, f"```text\n{usage}\n```", *options]))
    return page(
        "Commands",
        "Every command of `megatron-rl` and its options, as `--help` prints them. Arguments like `trainer.seed=2` are "
        "settings: [Configuration keys](keys.md). Exit codes: [Exit codes](exit_codes.md).",
        *sections,
    )


def option_cells(option: Any) -> tuple[str, str, str]:
    """Return a row of a command's table: name, meaning, default."""
    is_option = option.param_type_name == "option"
    names = ", ".join(map(code, option.opts)) if is_option else code((option.metavar or option.name).upper())
    default = option.default
    shown = "-" if default is None or default is False or callable(default) or default == [] else code(str(default))
    needed = "needed" if option.required else shown
    return names, " ".join((getattr(option, "help", None) or "").split()), needed


PAGES: dict[str, Callable[[], str]] = {
    "keys.md": keys_page,
    "cli.md": cli_page,
    "metrics.md": metrics_page,
    "columns.md": columns_page,
    "support.md": support_page,
    "features.md": features_page,
    "not_supported.md": not_supported_page,
}
"""File in docs/reference -> what makes its text."""


def stale_pages(folder: Path = FOLDER) -> list[str]:
    """Return the pages whose files differ from what the package declares."""
    texts = {name: make() for name, make in PAGES.items()}
    return [
        name for name, text in texts.items() if not (folder / name).is_file() or (folder / name).read_text() != text
    ]


def condition(row: PresetRow) -> str:
    """Return where a preset sets a row."""
    parts = ["on GPUs"] * bool(row.off_cpu) + [f"{row.package} is installed"] * bool(row.package)
    values = ((key, " or ".join(map(shown, allowed))) for key, allowed in row.only_at.items())
    return ", ".join([*parts, *(f"{code(key.rpartition('.')[2])} is {text}" for key, text in values)]) or "always"


def preset_table() -> str:
    """Return the keys of every preset."""
    rows = (
        (code(name), code(row.key), code(shown(row.value)), condition(row), row.why)
        for name, rows in PRESETS.items()
        for row in rows
    )
    return table_of(("preset", "key", "value", "where", "why"), rows)


def audit(text: str) -> str:
    """Return the text of the GPU audit with its table of presets."""
    return with_tables(text, {"presets": preset_table()}, Path(__file__).name)


def data(text: str) -> str:
    """Return the text of the page on data with its table of bad rows."""
    rows = ((code(kind), rule, remedy) for kind, (rule, remedy) in KINDS.items())
    return with_tables(text, {"bad rows": table_of(("kind", "must hold", "what to do"), rows)}, Path(__file__).name)


def readme(text: str) -> str:
    """Return README's text with its table of supported models."""
    return with_tables(text, {SUPPORTED: supported_table()}, Path(__file__).name)


def main() -> None:
    """Write the pages, or with --check exit with the names of those that are not current."""
    texts = {file: (file.read_text(), put) for file, put in ((README, readme), (AUDIT, audit), (DATA, data))}
    if "--check" in sys.argv[1:]:
        if stale := stale_pages() + [file.name for file, (text, put) in texts.items() if put(text) != text]:
            sys.exit(f"not current: {', '.join(stale)}; run python scripts/reference_pages.py")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
    for file, (text, put) in texts.items():
        file.write_text(put(text))


if __name__ == "__main__":
    main()
