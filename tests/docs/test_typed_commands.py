"""Each command of the docs: executed by a test, or marked where it stands; its options, files and keys exist.

The mark is a comment directly above the block: <!-- not executed: it needs a cluster of GPUs -->
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import typer
from typed_commands import REPOSITORY, VARIABLE, Typed, all_commands, commands_of

from megatron_rl.cli import app
from megatron_rl.config.keys import is_key
from megatron_rl.config.load import read_override
from megatron_rl.config.tasks import PPO
from megatron_rl.config.verl_compat.translate import translate
from megatron_rl.errors import ConfigError
from megatron_rl.planning.checked_config import COMMANDS, checked, commanded

DEMO = r"train --config configs/demo_cpu\.yaml"
KEYS = r"(?: [\w.]+=\S+)*"
TUTORIAL = "tests/e2e/test_tutorial.py::test_every_command_of_the_tutorial"
EXECUTED = {
    rf"megatron-rl serve --config configs/demo_cpu\.yaml --keys \S+ --local --collapse{KEYS}": (
        "tests/e2e/test_service.py::test_clients_train_and_sample_and_a_killed_service_continues"
    ),
    rf"megatron-rl plan( .*)?{KEYS}": "tests/test_command_line.py::test_plan_prints_the_table_of_a_valid_run",
    rf"megatron-rl {DEMO} --local --collapse": ("tests/e2e/test_run_layouts.py::test_one_process_by_overrides"),
    rf"megatron-rl {DEMO} --rollouts-from \S+{KEYS}": (
        "tests/e2e/test_recorded_samples_runs.py::test_recorded_samples_train_the_same_model_bit_for_bit"
    ),
    rf"megatron-rl {DEMO} trainer\.launcher=local": "tests/e2e/test_launchers.py::test_ends_without_ray",
    rf"megatron-rl {DEMO} trainer\.val_only=true": (
        "tests/e2e/test_eval_runs.py::test_a_run_that_only_validates_leaves_its_files_alone"
    ),
    rf"megatron-rl {DEMO} trainer\.hardware_file=\S+": (
        "tests/e2e/test_planned_run.py::test_phases_that_depart_are_said_once"
    ),
    rf"megatron-rl {DEMO} trainer\.max_repairs=\d+": (
        "tests/e2e/test_repaired_runs.py::test_a_killed_rank_is_started_anew"
    ),
    rf"megatron-rl {DEMO} .*quantization=fp8{KEYS}": (
        "tests/e2e/test_run_layouts.py::test_the_demo_learns_with_rollouts_in_eight_bits"
    ),
    rf"megatron-rl {DEMO} .*dtype=bfloat16{KEYS}": "tests/e2e/test_run_layouts.py::test_the_demo_learns_in_bfloat16",
    rf"megatron-rl {DEMO}.* trainer\.save_freq=5{KEYS}": (
        "tests/e2e/test_resumed_runs.py::test_killed_run_of_two_ranks_goes_on_exactly_and_elsewhere"
    ),
    rf"megatron-rl {DEMO}{KEYS}": "tests/e2e/test_several_nodes.py::test_the_demo_trains_on_two_nodes",
    r"megatron-rl train --config configs/agents/guess\.yaml": (
        "tests/e2e/test_pages_of_runs.py::test_every_tab_at_two_widths"
    ),
    rf"megatron-rl train --config configs/async_cpu\.yaml .*min_replicas=\d+{KEYS}": (
        "tests/e2e/test_elastic_replicas.py::test_replicas_leave_on_notices_and_come_back"
    ),
    r"echo 1 >> \S+/drain": "tests/e2e/test_elastic_replicas.py::test_replicas_leave_on_notices_and_come_back",
    r"megatron-rl train --config configs/split_cpu\.yaml": "tests/e2e/test_adapter_runs.py::test_adapters_over_pools",
    rf"megatron-rl train --config configs/async_cpu\.yaml --replay \S+{KEYS}": (
        "tests/e2e/test_async_runs.py::test_a_recorded_run_is_repeated_bit_for_bit"
    ),
    r"megatron-rl train --config configs/async_cpu\.yaml": "tests/e2e/test_async_runs.py::test_the_demo_is_learnt",
    r"megatron-rl train --config configs/distill_cpu\.yaml": (
        "tests/e2e/test_distillation_runs.py::test_the_demo_learns_without_rewards"
    ),
    rf"megatron-rl train --config configs/grpo_cpu\.yaml{KEYS} \S+per_group=true": (
        "tests/e2e/test_group_rewards.py::test_the_demo_learns_from_ranks"
    ),
    rf"megatron-rl train --config configs/grpo_cpu\.yaml{KEYS}": (
        "tests/e2e/test_families_learn.py::test_the_demo_inside_a_larger_model_learns"
    ),
    r"megatron-rl train --config configs/lora_cpu\.yaml": (
        "tests/e2e/test_adapter_runs.py::test_demo_learns_with_adapters"
    ),
    r"megatron-rl train --config configs/images_cpu\.yaml": (
        "tests/e2e/test_image_runs.py::test_the_demo_with_images_learns"
    ),
    r"python scripts/show_answers\.py \S+": "tests/e2e/test_image_runs.py::test_the_demo_with_images_learns",
    r"megatron-rl train .*lora\.adapter_path=\S+": (
        "tests/e2e/test_adapter_files.py::test_two_ranks_start_from_an_adapter"
    ),
    r"megatron-rl train .*lora\.rank=\d+": "tests/e2e/test_adapter_files.py::test_what_a_run_leaves",
    r"megatron-rl (sft|reward) .*lora\.rank=\d+": "tests/e2e/test_adapter_files.py::test_stages",
    r"megatron-rl train .*context_parallel_size=2": (
        "tests/e2e/test_run_layouts.py::test_context_parallelism_by_overrides"
    ),
    r"megatron-rl train --config (my|FILE)\.yaml": "tests/e2e/test_ported_run.py::test_a_script_of_verl_trains",
    rf"megatron-rl (sft|reward) --config \S+{KEYS}": "tests/e2e/test_demo_rlhf.py::test_the_three_stages",
    r"megatron-rl train --config configs/stages/rlhf_cpu\.yaml": "tests/e2e/test_demo_rlhf.py::test_the_three_stages",
    rf"megatron-rl dpo --config \S+{KEYS}": "tests/e2e/test_stage_runs.py::test_killed_stage_goes_on_exactly",
    r"megatron-rl doctor": "tests/e2e/test_first_hour.py::test_doctor_has_a_line_for_each_thing",
    r"python scripts/make_tutorial_data\.py \S+": TUTORIAL,
    r"megatron-rl init mine --data .*": TUTORIAL,
    r"megatron-rl (sft|train|eval) --config mine/run\.yaml --local .*": TUTORIAL,
    r"megatron-rl (view|explain) mine/grpo.*": TUTORIAL,
    r"megatron-rl export --checkpoint mine/grpo .*": TUTORIAL,
    r"megatron-rl init \S+ --model tiny .*": "tests/e2e/test_first_hour.py::test_from_nothing_to_a_page",
    rf"megatron-rl (plan|train) --config \w+/run\.yaml( --local)?{KEYS}": (
        "tests/e2e/test_first_hour.py::test_from_nothing_to_a_page"
    ),
    r"megatron-rl init \S+ --model FOLDER .*": (
        "tests/starter/test_starting_project.py::test_the_first_layout_that_fits_is_taken"
    ),
    r"megatron-rl export .*--adapter": "tests/e2e/test_adapter_files.py::test_what_a_run_leaves",
    r"megatron-rl export .*--base \S+": "tests/e2e/test_adapter_files.py::test_a_base_that_has_moved_or_changed",
    r"megatron-rl export .*": "tests/e2e/test_resumed_runs.py::test_what_a_run_has_saved_is_exported",
    r"megatron-rl average .*": "tests/e2e/test_average_runs.py::test_checkpoints_of_two_layouts",
    r"megatron-rl eval .*": "tests/e2e/test_eval_runs.py::test_a_stopped_evaluation_goes_on",
    r"megatron-rl generate .*": "tests/e2e/test_eval_runs.py::test_a_checkpoint_generates_without_ground_truth",
    r"megatron-rl port .*": "tests/port/test_scripts_of_verl.py::test_exit_codes_of_the_command",
    r"megatron-rl (profile|map) .*": (
        "tests/profile/test_profiled_here.py::test_the_command_writes_a_file_for_plan_and_map"
    ),
    r"megatron-rl rehearse .*": "tests/rehearse/test_rehearsed_recipes.py::test_a_rank_of_the_70b_recipe",
    r"RAY_ADDRESS=\S+ megatron-rl check-cluster .*": "tests/e2e/test_cluster_check.py::test_sound_nodes_pass",
    r"(megatron-rl nightly|bash scripts/nightly\.sh)( .*)?": (
        "tests/e2e/test_nightly_gate.py::test_golden_pass_after_a_preemption"
    ),
    r"bash scripts/ablate_parallelism\.sh --dry-run": (
        "tests/trials/test_ablation_planned.py::test_dry_run_starts_nothing_and_writes_nothing"
    ),
    r"(megatron-rl ablate .*|bash scripts/ablate_parallelism\.sh)": (
        "tests/e2e/test_ablation.py::test_an_interrupted_ablation_goes_on"
    ),
    r"megatron-rl view .*": "tests/view/test_page_data.py::test_view_writes_one_file",
    r"megatron-rl explain .*": "tests/view/test_sample_life.py::test_explain_prints_texts_as_they_are",
    rf"DRY_RUN=1 bash scripts/run_70b_ppo\.sh{KEYS}": (
        "tests/scripts/test_70b_launcher.py::test_dry_run_prints_the_plan"
    ),
    r"STAGE=\w+ DRY_RUN=1 bash scripts/run_70b_ppo\.sh": (
        "tests/scripts/test_70b_launcher.py::test_a_stage_is_started_by_the_same_script"
    ),
    r"REHEARSE=1 bash scripts/run_70b_ppo\.sh": (
        "tests/scripts/test_70b_launcher.py::test_rehearse_hands_its_variables_on"
    ),
    r"(STAGE=\w+ )?SCALE=tiny bash scripts/run_70b_ppo\.sh": (
        "tests/e2e/test_70b_script.py::test_killed_tiny_70b_goes_on"
    ),
    r"python scripts/bench/held_columns\.py.*": "tests/scripts/test_held_bench.py::test_both_ways_are_measured",
    r"python scripts/campaign\.py .*": "tests/scripts/test_campaign.py::test_a_short_campaign",
    r"python scripts/gpu_check\.py": "tests/scripts/test_gpu_check.py::test_every_step_that_a_cpu_has",
    r"python scripts/check_versions\.py .*": (
        "tests/gpu_contract/test_relied_on.py::test_what_is_installed_has_all_of_it"
    ),
    r"python scripts/demo_loop\.py .*": "tests/e2e/test_own_loop.py::test_the_loop_runs",
    r"python scripts/make_demo_preferences\.py": (
        "tests/scripts/test_demo_preferences.py::test_the_files_are_read_by_the_stages"
    ),
    r"python scripts/show_stages\.py .*": "tests/scripts/test_show_stages.py::test_the_table_and_the_picture",
}
"""Pattern of a whole command -> the test that executes it, perhaps shortened; the first pattern that fits counts."""

NOT_OURS = re.compile(r"(FILE|my\w*|\w+/run)\.yaml")
"""Configurations that stand for one of the reader's, or that `init` writes."""
MADE = re.compile(r"=(outputs|assets)/\S+ must be ")
"""A part of a violation that names a file which another command makes."""

TYPED = all_commands()


def expanded(typed: Typed) -> list[Typed]:
    """What `make` would run: commands of ours, the installation and the assets left out. Other commands: themselves."""
    if typed.words[0] != "make":
        return [typed]
    command = ["make", "--dry-run", "--no-print-directory", *typed.words[1:]]
    outer = ("MAKE", "ARGS", "TASK")  # of the make that runs this test
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{typed}: {done.stderr}"
    lines = re.findall(
        r"^(?:test .*exec )?(\S*(?:megatron-rl|python -m (?:megatron_rl|pytest)) .*|\S*python scripts/\S+.*)$",
        done.stdout,
        re.M,
    )
    block = "\n".join(line for line in lines if "_assets.py" not in line and "real_model.py" not in line)
    parts = commands_of(f"```bash\n{block}\n```", typed.page)
    return [Typed(typed.page, typed.line, part.variables, part.words, typed.reason) for part in parts]


RUN = [(typed, part) for typed in TYPED for part in expanded(typed)]


def fits(typed: Typed, table: dict[str, str]) -> str:
    """What a table says of a command; "" where no pattern of it fits."""
    return next((said for pattern, said in table.items() if re.fullmatch(pattern, typed.text)), "")


def test_every_command_is_executed_or_says_why_not() -> None:
    """Would not catch a test that no longer runs what it ran."""
    without = [(typed, part) for typed, part in RUN if not fits(part, EXECUTED)]
    unsaid = [str(typed) for typed, part in without if not typed.reason]
    assert not unsaid
    needless = {f"{typed.page}: {typed.reason}" for typed in TYPED if typed.reason}
    needless -= {f"{typed.page}: {typed.reason}" for typed, _ in without}
    assert not needless


def test_the_tests_of_the_table_exist() -> None:
    """By their names, and each line of the table is needed."""
    assert not {pattern for pattern in EXECUTED if EXECUTED[pattern] not in {fits(part, EXECUTED) for _, part in RUN}}
    for test in EXECUTED.values():
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (REPOSITORY / file).read_text(), test


def parsed(words: Sequence[str]) -> typer.Context:
    """The command line's own reading of a command of ours, which starts nothing. Raises what it would print."""
    command = typer.main.get_command(app)
    above = typer.Context(command)
    name, subcommand, rest = command.resolve_command(above, list(words[1:]))
    return subcommand.make_context(name, rest, parent=above)


def faults(typed: Typed) -> list[str]:
    """What a command of ours names that does not exist, or what its configuration breaks."""
    try:
        context = parsed(typed.words)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer does not export the class of its usage errors
            raise
        return [error.format_message()]
    name, overrides = context.info_name, list(context.params.get("overrides") or ())
    if name == "port":  # its overrides are Hydra's
        return []
    wrong = []
    for override in overrides:
        try:
            settings = translate(list(read_override(override)), is_key).settings
        except ConfigError as error:
            wrong.append(str(error))
            continue
        wrong += [f"unknown key {one.key}" for one in settings if not is_key(one.key)]
    config = context.params.get("config")
    if wrong or config is None or NOT_OURS.fullmatch(str(config)):
        return wrong
    if not (REPOSITORY / config).exists():
        return [f"no file {config}"]
    task = {command: task for task, command in COMMANDS.items()}.get(str(name))
    change = None if task is None else partial(commanded, task=task)
    broken = map(str, checked(Path(config), overrides, True, change, task or PPO).violations)
    return [text for text in broken if not MADE.search(text)]


@pytest.mark.parametrize("text", sorted({part.text for _, part in RUN if "megatron-rl" in part.words}))
def test_options_files_and_keys_exist(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of ours can be read, and its configuration breaks no rule.

    Would not catch a value that trains badly.
    """
    monkeypatch.chdir(REPOSITORY)
    where = [str(typed) for typed, part in RUN if part.text == text]
    part = next(part for _, part in RUN if part.text == text)
    assert not faults(part), where


def test_scripts_and_their_options_exist() -> None:
    """A Python script has the options that the docs give it, a shell script the variables, by name."""
    missing = []
    for typed, part in RUN:
        for at, word in enumerate(part.words):
            if not re.fullmatch(r"scripts/\S+", word):
                continue
            file = REPOSITORY / word
            if not file.exists():
                missing.append(f"{typed}: {word}")
                continue
            source = file.read_text()
            options = [option for option in part.words[at + 1 :] if option.startswith("--")]
            if file.suffix == ".py":
                missing += [f"{typed}: {option}" for option in options if f'"{option}"' not in source]
            missing += [f"{typed}: {one}" for one in part.variables if f"{VARIABLE.match(one)[0]}" not in source]
    assert not missing


def test_commands_name_what_earlier_ones_have_made() -> None:
    """`make demo` saves no checkpoint and records 8 samples of a step: a page that names more makes it first.

    Would not catch an earlier command that ends without having made it.
    """
    lacking = []
    for at, (typed, part) in enumerate(RUN):
        before = [f"{above.text} {other.text}" for above, other in RUN[:at] if above.page == typed.page]
        needs = {"save_freq=": "outputs/demo/global_step_" in part.text}
        needs["save_freq=5"] = part.words[1:2] == ("average",) and "outputs/demo" in part.words
        if "--rollouts-from" in part.words:
            needs[
                f"recorded_prompts=-1 trainer.default_local_dir={part.words[part.words.index('--rollouts-from') + 1]}"
            ] = True
        folders = [word for word in part.words if part.words[1:2] == ("view",) and word.startswith("outputs/")]
        needs |= {f"default_local_dir={folder}": folder != "outputs/demo" for folder in folders}
        lacking += [
            f"{typed}: {need}" for need, is_one in needs.items() if is_one and not any(need in text for text in before)
        ]
    assert not lacking


def test_commands_are_split_as_a_shell_would() -> None:
    """Variables, two lines, `&&`, quotes, comments and marks, by hand. Would not catch a loop or a pipe."""
    text = (
        "<!-- not executed: x -->\n```bash\nM=a.b\n"
        "X=1 .venv/bin/python -m megatron_rl plan $M=2 \\\n   ${M}_c='3 4'  # d\n\n"
        'cd e && sha256sum *#f\n```\n```bash\nmake demo ARGS="$M=1"\n```\n'
    )
    first, second, third, fourth = commands_of(text, "page")
    assert first == Typed("page", 4, ("X=1",), ("megatron-rl", "plan", "a.b=2", "a.b_c=3 4"), "x")
    assert (second.words, third.words, third.line) == (("cd", "e"), ("sha256sum", "*#f"), 7)
    assert (fourth.words, fourth.reason, fourth.line) == (("make", "demo", "ARGS=$M=1"), "", 10)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("megatron-rl plan --config configs/demo_cpu.yaml trainer.sead=2", "unknown key trainer.sead"),
        ("megatron-rl plan --config configs/no_such.yaml", "no file configs/no_such.yaml"),
        ("megatron-rl plan --config my.yaml --no-such", "--no-such"),
        ("megatron-rl plam --config my.yaml", "plam"),
        ("megatron-rl plan --config configs/demo_cpu.yaml trainer.n_gpus_per_node=3", "must divide"),
    ],
)
def test_faults_are_found(text: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert fault in " ".join(faults(Typed("page", 1, (), tuple(text.split()), "")))
