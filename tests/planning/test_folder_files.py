"""Damaged files of model folders, prompts and outputs: what a user can mend is said, and is no traceback."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from model_folders import problems, safetensors, write_model, write_prompts
from safetensors.torch import save_file

from megatron_rl.checkpoint.model_folder import LARGEST_CONFIG, ModelFolder
from megatron_rl.checkpoint.weight_files import read_header, read_weight_files
from megatron_rl.config.load import load_config
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.data.row_files import column_forms
from megatron_rl.errors import ConfigError
from megatron_rl.planning.file_rules import make_folders
from megatron_rl.planning.folder_files import FolderFiles, end_token_notes
from megatron_rl.planning.preflight import preflight

INDEX = "model.safetensors.index.json"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", safetensors(64)[:-1], "has 150 bytes, and its header says 151: it was cut off"),
        ("model.safetensors", safetensors(64) + b"x", "something follows its last tensor"),
        ("model.safetensors", safetensors(64)[:40], "has 40 bytes, which hold no header of safetensors"),
        ("model.safetensors", b"", "has 0 bytes, which hold no header"),
        ("model.safetensors", b"\xff" * 64, "has 64 bytes, which hold no header"),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0[]", "has a damaged header"),
        ("model.safetensors", safetensors(64, shape=[3]), "has a damaged header"),
        ("model.safetensors", safetensors(64, data_offsets=None), "has a damaged header"),
        (
            INDEX,
            b'{"weight_map": {"a": "b.safetensors", "w": "c"}}',
            "names files that are missing: b.safetensors, c",
        ),
        (INDEX, b'{"weight_map": {"v": "model.safetensors"}}', "names tensors that are not in their files: v"),
        (INDEX, b"{}", "has no weight_map"),
        (INDEX, b"{", "is not valid JSON"),
        ("tokenizer.json", b'{"model": {"vocab', "tokenizer.json is not valid JSON"),
        ("tokenizer.json", b'{"version": "1.0"}', "tokenizer.json has no model"),
        ("tokenizer.json", b"[" * 100_000, "tokenizer.json is not valid JSON"),
        ("tokenizer_config.json", b"\xff\xfe{", "tokenizer_config.json is not valid JSON"),
        ("special_tokens_map.json", b"[]", "special_tokens_map.json is not an object in braces"),
        ("generation_config.json", b"", "generation_config.json is not valid JSON"),
    ],
)
def test_damaged_files_of_a_folder(tmp_path, file, content, said):
    """Beside whole ones. Would not catch damage inside of a tensor, which no header tells."""
    folder = Path(write_model(tmp_path / "model"))
    assert FolderFiles.read(ModelFolder(folder)).faults == []
    (folder / file).write_bytes(content)
    (fault,) = FolderFiles.read(ModelFolder(folder)).faults
    assert said in fault and fault.startswith(file)


def test_headers_are_those_that_the_library_writes(tmp_path):
    """Types, shapes and places of several tensors, one of them empty. Would not catch a type that is not listed."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "one.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "one.safetensors")
    assert {name: entry.shape for name, entry in found.items()} == {"a": (2, 3), "b": (5,), "c": (0, 4)}
    content = (tmp_path / "one.safetensors").read_bytes()
    place = found["a"]
    assert torch.frombuffer(bytearray(content[place.start : place.stop]), dtype=torch.float32).tolist() == [*range(6)]
    assert read_weight_files(tmp_path)[1] == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2]", "is not an object in braces"),
        ("[" * 100_000, "is not valid JSON"),
        ("\ufeff{}", "is not valid JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not valid JSON"),
        (" " * LARGEST_CONFIG + "{}", f"bytes, and at most {LARGEST_CONFIG} are read"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648 of"),
        ({"num_hidden_layers": 10**18}, "must be <= 10000"),
        ({"head_dim": 10**12}, "must be <= 16777216"),
        ({"max_position_embeddings": 2**31}, "must be <= 2147483647"),
        ({"rope_parameters": {"rope_type": []}}, "rope_type=[] is not supported"),
        ({"head_dim": -1}, "must be a whole number >= 1"),
        ({"num_key_value_heads": "6"}, 'num_key_value_heads="6" of'),
        ({"architectures": [[]]}, "architectures=[[]] of"),
        ({"rope_parameters": []}, "must be an object in braces"),
        ({"rms_norm_eps": "1e-6"}, "must be a finite number > 0"),
        ({"layer_types": [5]}, "must be a list of names"),
        ({"eos_token_id": "</s>"}, "must be a token id, or a list of token ids"),
        ({"model_type": 5}, "model_type=5 of"),
        ({"model_type": None}, 'must exist, as transformers reads config.json by it; try: "qwen2"'),
        ({"model_type": "llama"}, 'model_type="llama" of'),
        ({"tie_word_embeddings": [1.5]}, "must be true or false"),
        ({"use_sliding_window": "false"}, "must be true or false"),
        ({"use_sliding_window": True, "sliding_window": 0}, "must be >= 1, because layers have a window"),
        ({"rms_norm_eps": None}, "must have a value or be left out: transformers reads no null there; try: 1e-06"),
        ({"hidden_size": 2}, "must divide hidden_size(2) where there is no head_dim"),
        ({"rope_theta": math.nan}, "rope_theta=NaN of"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "must hold finite numbers"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0 must be a finite number > 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "needs finite numbers > 0 for factor"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor=1.0 must be below high_freq"),
        ({"initializer_range": math.inf}, "initializer_range=Infinity of"),
        ({"num_nextn_predict_layers": "1"}, "must be a whole number >= 0"),
    ],
)
def test_settings_of_no_sense(config, tmp_path, content, said):
    """Each is one violation, and says so. Would not catch a key that only transformers reads."""
    folder = write_model(tmp_path / "model", **(content if isinstance(content, dict) else {}))
    if isinstance(content, str):
        Path(folder, "config.json").write_text(content)
    (problem,) = problems(config)
    assert said in problem


@pytest.mark.parametrize("vocabulary", [7, None, "text", {"a": "x"}, {"a": None}, [[1]], [7], [["a", 1, 2]]])
def test_a_strange_vocabulary_is_none(tmp_path, vocabulary):
    """The tokenizer's own loader refuses it. Would not catch numbers that are too large, which preflight compares."""
    folder = Path(write_model(tmp_path / "model"))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    assert FolderFiles.read(ModelFolder(folder)).tokens == {}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a loop of links", "a link to nothing", "a folder"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", INDEX])
def test_what_is_no_file_is_named_and_not_waited_for(config, tmp_path, file, kind):
    """In a model folder: nothing opens it. Would not catch a file whose disk hangs."""
    folder = Path(write_model(tmp_path / "model"))
    (folder / file).unlink(missing_ok=True)
    put_in_place(folder / file, kind)
    (problem,) = problems(config)
    assert f"{file} must be a file, and it is {kind}" in problem
    if file == "config.json":
        assert f"it is {kind}" in str(preflight(config, config_only=True)[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a loop of links", "a link to nothing", "a folder"])
def test_data_and_configurations_are_files(config, tmp_path, kind):
    """Prompts, a reward function, a configuration. Would not catch a pipe that a user means to be read."""
    for name in ("train.jsonl", "answers.jsonl", "rule.py", "run.yaml"):
        put_in_place(tmp_path / name, kind)
    config.custom_reward_function.path = str(tmp_path / "rule.py")
    config.data.train_files = str(tmp_path / "train.jsonl")
    for problem in problems(config):
        assert f"it is {kind}" in problem or kind == "a loop of links" and "Too many levels" in problem
    with pytest.raises(ConfigError, match=f"answers.jsonl is {kind}"):
        column_forms(str(tmp_path / "answers.jsonl"))
    with pytest.raises(ConfigError, match=f"run.yaml: it is {kind}"):
        load_config(tmp_path / "run.yaml")


def put_in_place(path: Path, kind: str) -> None:
    {
        "a pipe": lambda: os.mkfifo(path),
        "a device": lambda: path.symlink_to("/dev/zero"),
        "a loop of links": lambda: path.symlink_to(path),
        "a link to nothing": lambda: path.symlink_to(path.with_name("nothing")),
        "a folder": path.mkdir,
    }[kind]()


def test_who_ends_an_answer(config, tmp_path):
    """generation_config.json's where there is one; a critic needs none. Would not catch a number beyond the tokens."""
    folder = Path(write_model(tmp_path / "model"))
    config.critic.model.path = write_model(tmp_path / "critic", eos_token_id=None)
    for content in ({"eos_token_id": 5}, {"eos_token_id": [5, 6]}):
        (folder / "generation_config.json").write_text(json.dumps(content))
        assert problems(config) == []
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (problem,) = problems(config)
    assert "must name the tokens that end a response" in problem and "generation_config.json it is missing" in problem
    (folder / "generation_config.json").unlink()
    write_model(folder, eos_token_id=None)
    (problem,) = problems(config)
    assert "in its config.json it is None" in problem


@pytest.mark.parametrize(("declared", "is_said"), [(1, False), ([0, 1], False), (0, True), ([2, 0], True)])
def test_files_that_name_different_end_tokens(tmp_path, declared, is_said):
    """Token 1 is the tokenizer's. Would not catch a tokenizer without tokenizer.json, which a run compares."""
    folder = Path(write_model(tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<e>"}}')
    model = {"type": "WordLevel", "vocab": {"a": 2}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": [{"content": "<e>", "id": 1}]}))
    notes = end_token_notes(ModelFolder(folder))
    assert len(notes) == is_said and all("its tokenizer <e> (1), its generation_config.json" in note for note in notes)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            b'{"prompt": "\\ud800", "data_source": "a"}',
            "field 'prompt': '\\ud800'; text must not hold half of a surrogate pair",
        ),
        (
            b'{"reward_model": {"ground_truth": ["\\uDFFF"]}}',
            "field 'reward_model': '\\udfff'; text must not hold half of a surrogate pair",
        ),
        (b"[" * 100_000, "nested more deeply than can be read"),
        (b'{"prompt": "\xff"}', "byte 0xff at 12 of the line; text must be UTF-8"),
        (b'{"n": ' + b"9" * 5000 + b"}", "a line must be JSON"),
    ],
)
def test_lines_that_are_no_prompts(config, tmp_path, line, said):
    """The first line of a file of JSON lines. Would not catch a later line: the run reads those."""
    (tmp_path / "train.jsonl").write_bytes(line + b"\n")
    config.data.train_files = str(tmp_path / "train.jsonl")
    (problem,) = problems(config)
    assert said in problem and "line 1" in problem


def test_lines_after_a_byte_order_mark_and_of_paired_surrogates(config, tmp_path):
    """What editors on Windows write, and what JSON writes of an emoji. Would not catch UTF-16."""
    content = Path(write_prompts(tmp_path / "train.jsonl", prompt="\U0001f600")).read_bytes()
    assert b"\\ud83d\\ude00" in content
    (tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    config.data.train_files = str(tmp_path / "train.jsonl")
    assert problems(config) == []


@pytest.mark.parametrize(
    ("key", "path", "said"),
    [
        ("data.train_files", "~nobody_of_this_name/a.parquet", "Could not determine home directory"),
        ("data.val_files", ["a" * 300], "File name too long"),
        ("trainer.default_local_dir", "loop/run", "Too many levels of symbolic links"),
        ("critic.model.path", "\0", "null"),
    ],
)
def test_paths_that_cannot_be_sampled_stages(config, tmp_path, key, path, said):
    """Nothing else is looked at. Would not catch a folder of another user's, which root may read."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    group, _, name = key.rpartition(".")
    holder = {"data": config.data, "trainer": config.trainer, "critic.model": config.critic.model}[group]
    setattr(holder, name, str(tmp_path / path) if path == "loop/run" else path)
    (problem,) = preflight(config)
    assert list(problem.settings) == [key] and said in str(problem)


@pytest.mark.parametrize("key", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
def test_folders_that_cannot_be_made(tmp_path, key):
    """Where the system lets nobody write, root neither. Would not catch a disk that fills up later."""
    trainer = TrainerConfig(default_local_dir=str(tmp_path / "runs/one"))
    make_folders(trainer)
    assert (tmp_path / "runs/one").is_dir() and list((tmp_path / "runs/one").iterdir()) == []
    for path in ("/proc/no_such_run", "/proc/1"):
        setattr(trainer, key, path)
        with pytest.raises(ConfigError, match=f"trainer.{key}={path} must be a folder that can be created and written"):
            make_folders(trainer)
