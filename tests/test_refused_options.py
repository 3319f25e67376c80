"""Options that no command can use are refused at once, with code 2, the rule and the nearest value; nothing is left."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.cli.commands import COMMANDS
from megatron_rl.cli.output import check_output_file, check_output_folder, write_output
from megatron_rl.errors import ConfigError
from megatron_rl.profile.profile import ProfileRequest, requested

DEMO = ("--config", "configs/demo_cpu.yaml")
LONG = "x" * 300
NEITHER = "must be a file that can be written"

#  arguments, what the refusal says
NUMBERS = [
    (("plan", "--prompt-length", "nan"), "--prompt-length nan must be >= 1 and <= 16 .*try: --prompt-length 1$"),
    (("plan", "--prompt-length=-7"), "--prompt-length -7 must be"),
    (("plan", "--response-length", "1e400"), "--response-length inf must be .*try: --response-length 8$"),
    (("map", "--gpus", "4", "--prompt-length", "0"), "--prompt-length 0 must be"),
    (("map", "--gpus", "4", "--response-length", "nan"), "--response-length nan must be"),
    (("map", "--gpus", "0"), "--gpus 0 must be"),
    (("map", "--gpus", "4", "--gpus-per-node", "0"), "--gpus-per-node 0 must be >= 1 and <= 4; try: .* 1$"),
    (("map", "--gpus", "4", "--sample", "1" + "0" * 30), "--sample 10+ must be .*try: --sample 1000$"),
]
#  arguments without the path, the path, what the refusal says
PATHS = [
    (("map", "--gpus", "4", "--picture"), "x.exe", "must end in one of .png, .*try: --picture x.png$"),
    (("map", "--gpus", "4", "--picture"), "/proc/x.png", f"{NEITHER}: .*try: --picture outputs/picture.png$"),
    (("map", "--gpus", "4", "--out"), ".", f"{NEITHER}: Is a directory; try: --out outputs/out.yaml$"),
    (("map", "--gpus", "4", "--points"), LONG, f"{NEITHER}: File name too long"),
    (("profile", "--hardware-file"), "/proc/x.yaml", f"{NEITHER}: No such file"),
    (("profile", "--hardware-file"), "x.txt", "must end in one of .yaml, .yml; try: --hardware-file x.yaml$"),
    (("port", "trainer.seed=1", "--out"), "/proc/x.yaml", f"{NEITHER}: No such file"),
    (("ablate", "--config", "configs/ablation.yaml", "--folder"), "/proc/x", "must be a folder .*: No such file"),
]


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize(("arguments", "said"), NUMBERS)
def test_numbers_that_mean_nothing(arguments, said):
    """Neither a number, nor finite, nor in its range. Would not catch a bound that is too narrow."""
    command, *others = arguments
    text = refusal(command, *DEMO, *others)
    assert re.search(said, text), text


@pytest.mark.parametrize(("arguments", "path", "said"), PATHS)
def test_files_that_cannot_be_written(arguments, path, said):
    """Before a search or a measurement. Would not catch a disk that becomes full meanwhile."""
    command, *others = arguments
    text = refusal(command, *(DEMO if command == "map" else ()), *others, path)
    assert re.search(said, text), text


def test_looking_leaves_nothing_and_changes_nothing(tmp_path: Path):
    """New folders go again, a file stays as it is, a device and a pipe can be written to. Would not catch a race."""
    check_output_file("--out", tmp_path / "a/b/c.yaml")
    check_output_folder("--folder", tmp_path / "d/e")
    assert not list(tmp_path.iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "f/g.yaml")
    check_output_file("--out", tmp_path / "link")
    assert [one.name for one in tmp_path.iterdir()] == ["link"]
    kept = tmp_path / "kept.yaml"
    kept.write_text("before")
    os.mkfifo(tmp_path / "pipe")
    for file in (kept, Path("/dev/null"), tmp_path / "pipe", None):
        check_output_file("--out", file)
    assert kept.read_text() == "before"
    with pytest.raises(ConfigError, match="File exists; try: --folder outputs/new"):
        check_output_folder("--folder", kept)


#  --device, --ranks, GPUs of the machine: what is measured, or what the refusal says
MACHINES = [
    (None, None, 0, ProfileRequest("cpu", 4)),
    (None, None, 8, ProfileRequest("cuda", 8)),
    ("cpu", 2, 8, ProfileRequest("cpu", 2)),
    (None, 0, 0, "--ranks 0 must be >= 1 and <= 64; try: --ranks 1"),
    (None, 65, 0, "--ranks 65 must be >= 1 and <= 64; try: --ranks 64"),
    (None, 9, 8, "--ranks 9 must be >= 1 and <= 8; try: --ranks 8"),
    ("cuda", None, 0, "--device cuda needs a GPU, and this machine has none; try: --device cpu"),
]


@pytest.mark.parametrize(("device", "ranks", "gpus", "expected"), MACHINES)
def test_a_profile_of_what_the_machine_has(device, ranks, gpus, expected):
    """Defaults, and what is not there. Would not catch a machine whose driver lists GPUs that do not work."""
    if isinstance(expected, ProfileRequest):
        assert requested(device, ranks, gpus) == expected
    else:
        with pytest.raises(ConfigError, match=f"^{expected}$"):
            requested(device, ranks, gpus)


def test_pipes_and_devices_stay_what_they_are(tmp_path):
    """A reader of the pipe gets the text, and /dev/null is no file afterwards; through links, so that a fault harms
    no machine.
    """
    pipe, null, out = tmp_path / "pipe", tmp_path / "null", tmp_path / "out.yaml"
    os.mkfifo(pipe)
    null.symlink_to("/dev/null")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for file in (pipe, null):
        check_output_file("--out", file)
        write_output(file, b"text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo() and null.is_char_device()
    os.close(reader)
    with out.open("w") as opened, pytest.raises(ConfigError, match=f"leads to {out}, which other output goes to"):
        check_output_file("--out", Path(f"/proc/self/fd/{opened.fileno()}"))


SETTINGS = (
    *("trainer.max_actor_ckpt_to_keep=2", "actor_rollout_ref.actor.strategy=megatron", "+data.return_raw_chat=true"),
    *("++trainer.seed=3", "~trainer.test_freq", "~actor_rollout_ref.actor.ulysses_sequence_parallel_size"),
)
"""Keys of verl's and ours, with each of Hydra's prefixes."""
STAGES = {"sft": "sft_cpu", "reward": "reward_cpu", "dpo": "reward_cpu"}
FURTHER = {
    "eval": ("--out", "out"),
    "generate": ("--out", "out"),
    "map": ("--gpus", "4"),
    "rehearse": ("--out", "out"),
    "nightly": ("--folder", "out"),
    "ablate": ("--dry-run", "--folder", "out"),
}


@pytest.mark.parametrize(
    "command",
    [one.name for one in COMMANDS if one.name != "port" and "overrides" in inspect.signature(one.function).parameters],
)
def test_every_command_reads_settings_alike(command, tmp_path, monkeypatch):
    """verl's keys and Hydra's prefixes are read: the one key that nobody knows is the one that is refused.

    Would not catch a command that reads a value otherwise.
    """
    shared = Path.cwd()
    monkeypatch.chdir(tmp_path)
    for name in ("assets", "configs", "scripts"):
        (tmp_path / name).symlink_to(shared / name)
    file = {"ablate": "ablation"}.get(command) or (f"stages/{STAGES[command]}" if command in STAGES else "demo_cpu")
    given = ["--config", f"configs/{file}.yaml", *FURTHER.get(command, ())]
    text = refusal(command, *given, *SETTINGS, "trainer.seeed=1")
    assert "unknown key trainer.seeed" in text and "did you mean: trainer.seed=1" in text
    keys = [part.strip("+~").partition("=")[0] for part in SETTINGS]
    assert text.count("unknown key") == 1 and not any(re.search(rf"{re.escape(key)}\b", text) for key in keys[:3])


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_prompts_are_read_before_a_checkpoint_is_exported(command, tmp_path):
    """The refusal ends with an override to paste, and nothing is written. Would not catch a row further on."""
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1", "data_source": "unit"}\n')
    kept = "tests/fixtures/kept_runs/ppo"
    given = ("--config", f"{kept}.yaml", "--model", kept, "--data", tmp_path / "mine.jsonl", "--out", tmp_path / "out")
    text = refusal(command, *map(str, given), "data.prompt_key=question")
    assert "data.prompt_key=question must be a column" in text and "; try: data.prompt_key=prompt" in text
    assert not (tmp_path / "out").exists()
