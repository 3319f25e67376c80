"""What a run notes of its repairs, without a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.checkpoint.model_folder import model_folders
from megatron_rl.cluster.launcher import VISIBLE_GPUS
from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.signals import LastResort, StopRequest
from megatron_rl.config.load import load_config
from megatron_rl.config.roles import PoolSize
from megatron_rl.controller.repairs import REPAIRS_FILE, FaultHistory, Repair, Repairs
from megatron_rl.controller.run_setup import refuse_without_room
from megatron_rl.errors import ConfigError, DeviceFault, WorkerFailure

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def repaired() -> Repairs:
    """A run whose ranks are ready again after a loss in step 5."""
    config = load_config(REPOSITORY / "configs/demo_cpu.yaml", ["trainer.max_repairs=1"])
    last_resort = LastResort()
    last_resort.stand_down()
    repairs = Repairs(config, StopRequest(last_resort), local=False)
    repairs.took(4)
    repairs.all.append(Repair("rank 1 has died"))
    repairs._lost_at = repairs.started
    return repairs


def test_a_repair_is_a_line_and_metrics(repaired: Repairs, tmp_path: Path) -> None:
    """Four steps taken, and the copy of step 3 to go on from: one step is lost. The attempt after it notes nothing."""
    metrics = repaired.begun(3, "copy", tmp_path)
    (line,) = map(json.loads, (tmp_path / REPAIRS_FILE).read_text().splitlines())
    assert (line["number"], line["source"], line["step"], line["steps_lost"]) == (1, "copy", 3, 1)
    assert metrics == {"repair/number": 1, "repair/steps_lost": 1, "repair/seconds": line["seconds"]}
    assert repaired.begun(3, "copy", tmp_path) == {}


def test_a_repair_goes_on_without_its_line(repaired: Repairs, tmp_path: Path, capsys) -> None:
    """Where the file cannot be written a sentence says so. Would not catch a disk that fails later."""
    assert repaired.begun(3, "copy", tmp_path / "absent")["repair/number"] == 1
    assert "is missing repair 1: No such file or directory" in capsys.readouterr().out.replace("\n", "")


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch, repaired: Repairs) -> Iterator[Repairs]:
    """A run on this machine's four GPUs, one more than it needs, with a copy of step 4; no process is started."""
    monkeypatch.setenv(VISIBLE_GPUS, "0,1,2,3")
    config = load_config(
        REPOSITORY / "configs/demo_cpu.yaml",
        ["trainer.max_repairs=5", "trainer.n_gpus_per_node=3", "trainer.save_freq=9"],
    )
    repairs = Repairs(config, repaired.stop, local=False)
    with repairs, repairs.launcher(lambda: LocalLauncher("cuda")):
        repairs.took(4)
        repairs.keep(4, repairs.new_folder(4), {})
        yield repairs


def lost(gpu: str, kind: str, is_certain: bool) -> WorkerFailure:
    """The loss that a GPU's report makes."""
    failure = WorkerFailure(f"rank 1 raised RuntimeError: {kind}", is_loss=True)
    failure.device_fault = DeviceFault(kind, is_certain, "node", "host", gpu)
    return failure


def test_the_same_error_on_another_gpu_is_of_code(on_gpus: Repairs, capsys: pytest.CaptureFixture[str]) -> None:
    """An illegal memory access may be either; uncorrectable memory never is. Would not catch code that fails at random
    steps, which `max_repairs` bounds.
    """
    on_gpus.prepare(lost("2", "illegal memory access", is_certain=False))
    on_gpus.took(5)
    failure = lost("1", "illegal memory access", is_certain=False)
    assert FaultHistory().is_code(failure.device_fault, 5) is False
    on_gpus._last_step = 4
    with pytest.raises(WorkerFailure):
        on_gpus.prepare(failure)
    assert "the code does it, not the GPU" in " ".join(capsys.readouterr().out.split())
    history = FaultHistory()
    assert not any(history.is_code(lost(gpu, "uncorrectable ecc error", True).device_fault, 4) for gpu in "12")


def test_without_another_gpu_the_run_saves_and_ends(repaired: Repairs, on_gpus: Repairs) -> None:
    """The second broken GPU of four leaves two for three ranks: an attempt only to save, then the loss itself. Would
    not catch an attempt that needs the broken GPU for long.
    """
    on_gpus.prepare(lost("2", "uncorrectable ecc error", is_certain=True))
    assert not on_gpus.stop.is_set
    second = lost("0", "uncorrectable ecc error", is_certain=True)
    on_gpus.prepare(second)
    assert on_gpus.stop.is_set and on_gpus.stop.remaining_s() == 0 and on_gpus.unrepaired is second
    assert on_gpus.kept is not None and on_gpus._launcher.shortage([PoolSize(1, 4)]) == ""
    with pytest.raises(WorkerFailure) as raised:
        on_gpus.prepare(WorkerFailure("rank 0 died while it saved", is_loss=True))
    assert raised.value is second


def test_copies_without_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ranks start, where this machine's /dev/shm has 1 MB. Would not catch what other programs take later: then
    the copy itself is refused.
    """
    assets = f"actor_rollout_ref.model.path={REPOSITORY / 'assets/demo/model'}"
    config = load_config(REPOSITORY / "configs/demo_cpu.yaml", ["trainer.max_repairs=1", assets])
    folders = model_folders(config)
    refuse_without_room(config, folders)
    monkeypatch.setattr("megatron_rl.controller.run_setup.shared_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"need .* MB of /dev/shm, which has 1.05 MB free; try: a larger /dev/shm"):
        refuse_without_room(config, folders)
    config.trainer.copy_freq = -1
    refuse_without_room(config, folders)
