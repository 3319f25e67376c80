"""The command line: its exit codes, its messages and how soon they come."""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import typer
from typer.testing import CliRunner

from megatron_rl import __version__, cli
from megatron_rl.cli.commands import COMMANDS
from megatron_rl.cli.next_commands import evaluated, next_lines
from megatron_rl.config.load import load_config
from megatron_rl.config.verl_compat.default_differences import PORTED
from megatron_rl.errors import ConfigError, ParityError, RewardError, WorkerFailure
from megatron_rl.observe.program import name_hint, next_command

REPOSITORY = Path(__file__).parents[1]
DEMO = "configs/demo_cpu.yaml"


def megatron_rl(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_rl", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def planned(monkeypatch, capsys):
    """`megatron-rl plan` in this process, which has what it imports: code, stdout and stderr."""

    def planned(*arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.chdir(REPOSITORY)
        monkeypatch.setattr(sys, "argv", ["megatron-rl", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, ended.value.code, printed.out, printed.err)

    return planned


@pytest.fixture
def small_run(tmp_path) -> list[str]:
    """Arguments of a valid run, with its own tiny files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4,'
        ' "max_position_embeddings": 32, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 64,'
        ' "model_type": "llama"}'
    )
    (tmp_path / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "model/tokenizer.json").write_text('{"model": {}}')
    row = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    for name in ("train.parquet", "test.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / name)
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/test.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"trainer.default_local_dir={tmp_path}/out",
    ]


def test_misspelt_key_costs_seconds_and_exits_with_2():
    """In CPU seconds. No traceback, no torch. Would not catch a start that is slow only when all is right."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = megatron_rl("train", "--config", DEMO, "trainer.total_steps=3")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert "unknown key trainer.total_steps" in finished.stderr and "trainer.total_training_steps" in finished.stderr


def test_plan_of_an_evaluation(planned) -> None:
    """Its answers for each prompt and no step; a file that is missing is named once, by the key of the user's."""
    done = planned("--config", DEMO, "trainer.val_only=true")
    assert done.returncode == 0 and "responses per prompt" in done.stdout and "tokens/s per rank" not in done.stdout
    done = planned("--config", DEMO, "trainer.val_only=true", "data.val_files=assets/none.parquet")
    assert done.returncode == 2 and done.stderr.count("assets/none.parquet") == 1
    assert "data.val_files=assets/none.parquet" in done.stderr


def test_a_misspelt_key_leaves_no_table_of_the_default(planned) -> None:
    """Else the table shows n=8 to somebody who asked for 4. Would not catch the table of a misspelt value."""
    done = planned("--config", DEMO, "actor_rollout_ref.rollout.nn=4")
    assert done.returncode == 2 and done.stdout == "" and "rollout.nn" in done.stderr


def test_plan_prints_the_table_of_a_valid_run(small_run):
    """Would not catch a wrong number in the table; its own tests do."""
    finished = megatron_rl("plan", "--config", DEMO, *small_run)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "samples per step" in finished.stdout and "512" in finished.stdout
    assert "train.parquet" not in finished.stdout and "note: data.train_files has 1 prompts" in finished.stdout


def test_a_plan_is_one_screen_and_all_of_it_on_demand(planned, tmp_path):
    """The demo's in 40 lines of 80 columns, without a word on verl; with --all each table. Defaults that verl has
    otherwise are named for a run with a key of verl's, and for a file of `port`.

    Would not catch a number that is missing.
    """
    short, whole = planned("--config", DEMO), planned("--config", DEMO, "--all")
    lines = short.stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    rows = dict(re.findall(r"│ (\S[^│]*?) +│ +(\S[^│]*?) +│", short.stdout))
    assert (rows["fits into memory"], rows["layout"], rows["samples per step"]) == ("yes", "4 ranks", "512")
    assert rows["worst rank"].endswith("MB") and rows["one step"].endswith("s") and "--all" in lines[-1]
    for title in ("Layout and batch", "Groups of ranks", "Memory per GPU", "One step on cpu", "Transition"):
        assert title in whole.stdout and title not in short.stdout
    assert "verl" not in short.stdout + whole.stdout
    keyed = planned("--config", DEMO, "trainer.max_actor_ckpt_to_keep=2")
    assert "differs from verl: " in keyed.stdout and "more defaults, of speed and files; --all" in keyed.stdout
    ported = tmp_path / "ported.yaml"
    ported.write_text(f"{PORTED} from run.sh.\n" + (REPOSITORY / DEMO).read_text())
    assert "differs from verl: trainer.project_name" in planned("--config", str(ported), "--all").stdout


def test_a_plan_that_does_not_fit_leads_on(planned, small_run, tmp_path):
    """To changes, and to a search with the same overrides but those of the layout; a hardware file that is not there is
    said, and a tracker that is not installed. Would not catch a search that finds nothing.
    """
    tight = tmp_path / "tight.yaml"
    text = (REPOSITORY / "megatron_rl/planning/gpus/cpu.yaml").read_text()
    text = re.sub(r"(?m)^memory_bytes:.*", "memory_bytes: 50.0e+6", text)
    tight.write_text(re.sub(r"(?m)^context_bytes:.*", "context_bytes: 0", text))
    given = [*small_run, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]
    done = planned("--config", DEMO, "--hardware", str(tight), *given)
    assert "does not fit: the worst rank needs" in done.stdout and "one change is enough: " in done.stdout
    search = next(line for line in done.stdout.splitlines() if "search all layouts: " in line)
    words = shlex.split(search.partition("layouts: ")[2])
    assert words == ["megatron-rl", "map", "--config", DEMO, "--gpus", "4", "--hardware", str(tight), *small_run]
    done = planned("--config", DEMO, "--hardware", "no_such.yaml")
    assert done.returncode == 2 and "there is no hardware file no_such.yaml" in done.stderr
    done = planned("--without-files", "--config", DEMO, *small_run, "trainer.logger=[console,swanlab]")
    assert done.returncode == 0 and "names swanlab, which is not installed" in done.stdout


def test_plan_prints_table_and_violations(planned, small_run):
    """Would not catch a table that breaks on another violation."""
    broken = ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3", "trainer.device=tpu"]
    finished = planned("--config", DEMO, *small_run, *broken)
    assert finished.returncode == 2 and "samples per step" in finished.stdout
    assert "tp(2) * pp(3) must divide the 4 ranks" in finished.stderr and "trainer.device=tpu" in finished.stderr


def test_plan_as_json_needs_no_prose(planned, small_run):
    """A misspelt key, a wrong type and a broken rule in one object. Would not catch a value that JSON cannot hold."""
    broken = [
        "trainer.nnode=1",
        "data.shuffle=maybe",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3",
    ]
    finished = planned("--json", "--config", DEMO, *small_run, *broken)
    said = json.loads(finished.stdout)
    assert finished.returncode == 2 and not said["valid"] and finished.stderr == ""
    found = [(violation["settings"], violation["nearest"]) for violation in said["violations"]]
    megatron = "actor_rollout_ref.actor.megatron"
    assert found[:2] == [({"trainer.nnode": 1}, {"trainer.nnodes": 1}), ({"data.shuffle": "maybe"}, {})]
    sizes = {f"{megatron}.tensor_model_parallel_size": 2, f"{megatron}.pipeline_model_parallel_size": 3}
    assert sizes in [settings for settings, _ in found]
    finished = planned("--json", "--config", "configs/absent.yaml")
    assert finished.returncode == 2 and "no configuration file" in json.loads(finished.stdout)["violations"][0]["text"]


def test_plan_as_json_holds_the_whole_plan(planned, small_run):
    """Of a run without faults, on other hardware. Would not catch a wrong number; the planner's own tests do."""
    arguments = ["--json", "--hardware", "a100", "--response-length", "5", "--config", DEMO, *small_run]
    said = json.loads(planned(*arguments).stdout)
    assert said["valid"] and said["plan"]["memory"]["hardware"] == "a100" and said["plan"]["memory"]["fits"]
    assert said["plan"]["time"]["mean_response_length"] == 5
    assert {"batch", "pools", "groups", "memory", "transition", "time", "lacking_files"} == set(said["plan"])
    finished = planned("--hardware", "b10", "--config", DEMO, *small_run)
    assert finished.returncode == 2 and "must be one of a100, b200, cpu, h100, h200" in finished.stderr


def test_plan_before_the_download(planned, small_run, tmp_path):
    """Only config.json is there. Would not catch a plan that reads more of the folder."""
    for name in ("model/model.safetensors", "model/tokenizer.json", "train.parquet", "test.parquet"):
        (tmp_path / name).unlink()
    assert planned("--config", DEMO, *small_run).returncode == 2
    finished = planned("--without-files", "--config", DEMO, *small_run)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("plan --config configs/demo_cpu.yaml {small} | head -1", 0),
        pytest.param(
            "plan --config configs/demo_cpu.yaml {small} data.max_response_length=17 2>&1 | head -1",
            2,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "ablate --config configs/ablation.yaml --dry-run --folder {folder} | head -1",
            0,
            marks=pytest.mark.exhaustive,
        ),
        ("plan --config configs/demo_cpu.yaml {small} > /dev/full", 7),
        pytest.param("plan --config configs/demo_cpu.yaml --json {small} > /dev/full", 7, marks=pytest.mark.exhaustive),
    ],
)
def test_commands_keep_their_exit_code_when_nobody_reads(small_run, tmp_path, command, code):
    """`head` has gone when the table comes; a plan that its file lost is an error. Would not catch a slow reader."""
    command = command.format(small=" ".join(small_run), folder=tmp_path / "none")
    finished = subprocess.run(
        ["bash", "-c", f'"$0" -m megatron_rl {command}; exit "${{PIPESTATUS[0]}}"', sys.executable],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == code, finished.stderr
    lost = "StorageError: the output could not be written to stdout: No space left on device\n"
    assert finished.stderr == (lost if code == 7 else "")


def test_train_refuses_a_violation_before_it_loads_anything(small_run):
    """Would not catch rules that only a worker can check."""
    finished = megatron_rl("train", "--config", DEMO, *small_run, "data.max_response_length=17")
    assert finished.returncode == 2
    assert "try: data.max_response_length=16" in finished.stderr


AT_IMPORT = """
import os, signal, sys
class Signals:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Signals())
from megatron_rl.__main__ import main
main()
"""


@pytest.mark.parametrize(("module", "code"), [("megatron_rl.cli", 143), ("megatron_rl.train", 21)])
def test_a_signal_among_imports_says_that_nothing_was_started(small_run, module: str, code: int):
    """Of the command line, and of a run once its configuration is known. Would not catch one before Python's start."""
    program = AT_IMPORT.replace("sys.argv[1]", repr(module))
    command = [sys.executable, "-c", program, "train", "--config", DEMO, *small_run, "trainer.save_freq=1"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code, ended.stderr
    assert len(ended.stdout.splitlines()) <= 1  # a title
    assert ended.stderr.splitlines()[-1].startswith("SIGTERM: stopped while the command was starting; no process was")


def test_a_run_leads_on(tmp_path, monkeypatch):
    """By hand: of a run with everything, of one without a model, of a reward model. Would not catch a command that
    fails: tests/e2e/test_first_hour.py.
    """
    monkeypatch.setattr(sys, "argv", ["megatron-rl"])
    config = load_config(REPOSITORY / DEMO, [f"trainer.default_local_dir={tmp_path}"])
    given = ["trainer.default_local_dir=elsewhere", "a.b='x y'"]

    def commands(options=()):
        return [line.partition("  # ")[0] for line in next_lines(Path("my run.yaml"), given, config, options)]

    assert commands() == []
    (tmp_path / "metrics.jsonl").touch()
    assert commands() == [f"megatron-rl view {tmp_path}"]
    (tmp_path / "hf_model").mkdir()
    words = f"eval --config 'my run.yaml' --model {tmp_path} --out {tmp_path}_eval --local"
    quoted = shlex.quote("a.b='x y'")
    assert commands(["--local"])[1:] == [f"megatron-rl {words} {quoted}"]
    kept = ["data.max_response_length=9", "trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.megatron.dtype=float32"]
    trained = ["actor_rollout_ref.actor.optim.lr=1e-5", "data.train_batch_size=8", "trainer.total_training_steps=3"]
    assert evaluated(REPOSITORY / DEMO, [*kept, *trained], collapse=True) == kept
    assert evaluated(Path("no_file.yaml"), trained, collapse=False) == trained
    config.trainer.stage = "reward"
    assert commands()[1:] == [f"reward_model.model.path={tmp_path}/hf_model"]


@pytest.mark.parametrize(
    ("words", "expected"), [("megatron-rl tr", {"train"}), ("megatron-rl eval --sa", {"--samples"})]
)
def test_a_shell_completes_commands_and_options(monkeypatch, capsys, words, expected):
    """As bash asks. Would not catch a shell that asks otherwise: the scripts for them are typer's."""
    monkeypatch.setattr(sys, "argv", ["megatron-rl"])
    monkeypatch.setenv("_MEGATRON_RL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        cli.main()
    assert set(capsys.readouterr().out.split()) == expected


def test_missing_option_is_a_usage_error():
    """Would not catch a usage text that is out of date."""
    finished = megatron_rl("train")
    assert finished.returncode == 2 and "--config" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --config x.yaml --resume", "it resumes by itself"),
        ("sft --resume-from=x", "it resumes by itself"),
        ("train mine/run.yaml trainer.seed=2", "did you mean: --config mine/run.yaml"),
        ("search-layout --json mine/run.yml", "did you mean: --config mine/run.yml"),
        ("plan --hardware h.yaml", ""),
        ("plan --config a.yaml b.yaml", ""),
        ("train data.train_files=a.yaml", ""),
        ("port verl.yaml", ""),
        ("", ""),
    ],
)
def test_slips_of_options_say_what_to_write(arguments, said):
    """An option to resume, and a file without its option. Would not catch a file of another ending."""
    if said:
        with pytest.raises(ConfigError, match=said):
            cli.refuse_slips(arguments.split())
    else:
        cli.refuse_slips(arguments.split())


@pytest.mark.parametrize(("error", "code"), [(ConfigError, 2), (WorkerFailure, 3), (RewardError, 4), (ParityError, 5)])
def test_our_errors_become_one_message_and_their_exit_code(monkeypatch, capsys, error, code):
    """Brackets in a message stay as they are. Would not catch an error raised after the loop has ended."""

    def fail(**options: str) -> None:
        raise error("rank [3] of actor failed")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == code
    assert capsys.readouterr().err == f"{error.__name__}: rank [3] of actor failed\n"


def test_other_errors_keep_their_traceback(monkeypatch):
    """A fault of ours is not dressed up. Would not catch one that a library swallows."""

    def fail(**options: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_help_groups_commands_and_gives_an_example_of_each(capsys, monkeypatch):
    """Each panel and command once, old names and further ones run the same, and each example can be read.

    Would not catch an example whose configuration breaks a rule.
    """
    monkeypatch.setenv("COLUMNS", "100")
    group = typer.main.get_command(cli.app)
    shown = CliRunner().invoke(cli.app, ["--help"]).output
    names = [command.name for command in COMMANDS]
    assert re.findall(r"^│ ([a-z-]+) +[A-Z]", shown, re.M) == names and "docs/README.md" in shown
    assert [panel for panel in dict.fromkeys(one.panel for one in COMMANDS) if f" {panel} " not in shown] == []
    for command in COMMANDS:
        for name in (command.name, *command.other_names):
            text = CliRunner().invoke(cli.app, [name, "--help"]).output
            assert f"Example: megatron-rl {name}" in text and "Also called" not in text
            context = group.commands[name].make_context(name, shlex.split(command.example))
            assert context.command.callback.__wrapped__ is command.function
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"megatron-rl {__version__}\n"


def test_a_printed_command_works_as_printed(tmp_path, monkeypatch):
    """By the name where a shell finds this installation, else by the file that was started; never another one.

    Would not catch an alias of the shell.
    """
    own, other = (tmp_path / folder / "megatron-rl" for folder in ("venv/bin", "other"))
    for file in (own, other):
        file.parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(own)])
    for path, name in (
        (own.parent, "megatron-rl"),
        (other.parent, "venv/bin/megatron-rl"),
        ("", "venv/bin/megatron-rl"),
    ):
        monkeypatch.setenv("PATH", str(path))
        assert next_command("view", "my run") == f"{name} view 'my run'"
        assert (name_hint("see megatron-rl plan") == "") == (name == "megatron-rl")
    assert name_hint("nothing to type") == ""
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "__main__.py")])
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    assert next_command("doctor") == "venv/bin/megatron-rl doctor"
    own.unlink()
    assert next_command("doctor") == f"{own.with_name('python')} -m megatron_rl doctor"
