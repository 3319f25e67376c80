"""Which lines of the package make code or objects out of bytes, and that nothing foreign gets there."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LOADS = {"load", "loads", "Unpickler"}
MODULES = {
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch",
    "np",
    "numpy",
    "yaml",
    "pd",
    "pandas",
}
BARE = {"eval", "exec", "compile", "__import__", "exec_module", "run_path", "run_module", "unsafe_load", "full_load"}
OURS = {
    "agents/adapters/tinker_cookbook.py": {"exec_module"},
    "agents/adapters/verifiers.py": {"exec_module"},
    "agents/interpreter_program.py": {"exec_module"},
    "cluster/rank_messages.py": {"pickle.Unpickler"},
    "cluster/rank_worker.py": {"pickle.loads"},
    "config/load.py": {"pickle.loads"},
    "config/user_functions.py": {"exec_module"},
    "data/template_process.py": {"pickle.loads"},
    "hybrid_engine/transport.py": {"pickle.loads"},
    "user_code/worker_supervisor.py": {"pickle.loads"},
    "user_code/work_processes.py": {"pickle.loads"},
    "user_code/worker.py": {"pickle.loads"},
    "megatron_core/cpu_torch.py": {"exec_module"},
    "megatron_core/without_triton.py": {"exec_module"},
    "vllm/without_torchvision.py": {"exec_module"},
}
"""The only ones: messages between a run's own processes, a pickle that the same process has made, the files that a user
names in the configuration, and modules of megatron-core's and vLLM's."""


def makers(source: str) -> set[str]:
    """Calls in a file that could run what they read."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if (
                module in MODULES and name in LOADS
            ):
                found.add(f"{module}.{name}")
            case ast.ClassDef(bases=[ast.Attribute(value=ast.Name(id=module), attr=name), *_]) if (
                module in MODULES and name in LOADS
            ):
                found.add(f"{module}.{name}")
            case ast.Call(func=ast.Attribute(attr="recv"), args=[]):  # of multiprocessing's connections, a pickle
                found.add("recv")
            case ast.Call(func=ast.Name(id=name)) if name in BARE:
                found.add(name)
            case ast.Call(func=ast.Attribute(attr=name)) if name in BARE - {"eval", "compile"}:
                found.add(name)
            case ast.keyword(arg="trust_remote_code" | "allow_pickle", value=ast.Constant(value=True)):
                found.add(str(node.arg))
            case ast.keyword(arg="weights_only", value=ast.Constant(value=False)):
                found.add("weights_only")
    return found


def test_only_our_own_messages_and_the_users_files_become_objects() -> None:
    """Every file of the package and of the patches. Would not catch a library that loads a pickle by itself: foreign
    folders are tried below, and checkpoints in tests/dist/test_checkpoint_pickles.py.
    """
    rooms = [REPOSITORY / "megatron_rl", REPOSITORY / "third_party_patches"]
    found = {str(file.relative_to(room)): makers(file.read_text()) for room in rooms for file in room.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == OURS


def test_the_scan_sees_what_it_looks_for() -> None:
    """Would not catch a function under another name."""
    source = "torch.load(f)\nexec(text)\nx.eval()\nre.compile(p)\nload(f, trust_remote_code=True)\n"
    assert makers(f"{source}spec.loader.exec_module(m)") == {"torch.load", "exec", "trust_remote_code", "exec_module"}


class Leaves:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


CODE = "import pathlib\npathlib.Path({mark!r}).touch()\nclass Tokenizer: pass\n"
PICKLES = ("pytorch_model.bin", "adapter_model.bin", "model.pt", "training_args.bin", "optimizer.pt")


def hostile_folder(folder: Path, mark: Path) -> Path:
    """A model's folder as Hugging Face's libraries know it, in which all that can hold code makes the mark."""
    folder.mkdir()
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(Leaves(mark)))
    code = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None], "AutoModelForCausalLM": "own.Model"}
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "architectures": ["Own"], "auto_map": code}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokenizer", "auto_map": code}))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return folder


def test_nothing_of_a_foreign_folder_is_run(tmp_path: Path) -> None:
    """Weights as pickles and code of the folder's own, offered to all that reads folders: each refuses, nothing runs.
    The pickle is a real one: loading it makes the mark. Would not catch a loader that is not named here.
    """
    from megatron_rl.checkpoint.adapter_folder import AdapterFiles
    from megatron_rl.checkpoint.hf_import import HFFolder
    from megatron_rl.checkpoint.identity import folder_digest
    from megatron_rl.checkpoint.model_folder import ModelFolder
    from megatron_rl.errors import ConfigError
    from megatron_rl.planning.folder_files import lacking_in

    mark = tmp_path / "mark"
    folder = hostile_folder(tmp_path / "model", mark)
    for read in (HFFolder, lambda path: ModelFolder(path).tokenizer, AdapterFiles.open):
        with pytest.raises(ConfigError):
            read(folder)
    assert folder_digest(folder) is None and "must hold *.safetensors files" in lacking_in(folder)
    assert not mark.exists()
    pickle.loads((folder / PICKLES[0]).read_bytes())
    assert mark.exists()


@pytest.mark.parametrize(
    "text", ["trainer: !!python/object/apply:os.system [touch {mark}]", "a: !!python/name:os.system"]
)
def test_a_configuration_makes_no_objects(tmp_path: Path, text: str) -> None:
    """YAML's tags for Python's objects are refused, with the file. Would not catch a tag of a later library."""
    from megatron_rl.config.load import load_config
    from megatron_rl.errors import ConfigError

    mark = tmp_path / "mark"
    (tmp_path / "run.yaml").write_text(text.format(mark=mark))
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config(str(tmp_path / "run.yaml"), [])
    assert not mark.exists()
