"""A run that dies at any instant of the checkpoint protocol: the next start finds the newest complete checkpoint.

The real protocol (`folders`, `manifest`, `durable`, `resume`) runs in the order in which `Checkpoints` runs it, in a
child that dies before its first, second, ... file-system operation, until one comes to its end: see `dying`. What a
death in the middle of a write or a power cut leaves is made by cutting files. That the controller keeps this order, and
that ranks write what they digest, is shown by real kills of whole runs, in tests/e2e/test_random_kills.py.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dying import content, die_before, every_instant, sync_all, unsynced
from saved import SETTINGS

from megatron_rl.checkpoint import folders, manifest
from megatron_rl.checkpoint.contents import write_role_file
from megatron_rl.checkpoint.folders import LATEST, LEFTOVERS, commit, find, remove_old, set_aside, step_folder, sweep
from megatron_rl.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    broken_files,
    digest_files,
    model_identity,
    read_manifest,
)
from megatron_rl.checkpoint.resume import select
from megatron_rl.config.trainer import TrainerConfig

pytestmark = pytest.mark.timeout(120)

MODELS = {"actor": model_identity(SETTINGS)}
FILES = ("run.json", "actor/__0_0.distcp", "actor/.metadata", "actor/role.json", "actor/huggingface/config.json")
KEEP = 1
MEMORY = Path("/dev/shm")
Tell = Callable[[object], None]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process only prepares and looks; its children note what they sync, see `dying`."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def one_file_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of folders of five tiny files: starting threads to read them takes longer than reading them."""
    monkeypatch.setattr(manifest, "THREADS", 1)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is room for one: thousands of small files are slow on a disk that others use."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="every_instant_") as folder:
        yield Path(folder)


def silent(_: object) -> None:
    """Nobody listens."""


def write(root: Path, step: int, past: str = "") -> tuple[Path, Manifest]:
    """What a run writes for a step, in its order; `past` tells steps of the same number apart."""
    folder = folders.unfinished_folder(root, step)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "actor/huggingface").mkdir(parents=True)
    (folder / "actor/__0_0.distcp").write_text(f"weights of step {step} {past}")
    (folder / "actor/.metadata").write_bytes(pickle.dumps({"step": step}))
    records = digest_files(folder, FILES[1:3])
    (folder / "run.json").write_text(f"run of step {step} {past}")
    write_role_file(folder, "actor", step)
    (folder / "actor/huggingface/config.json").write_text("{}")
    return folder, Manifest(FORMAT, step, MODELS, records | digest_files(folder, [FILES[0], *FILES[3:]]))


def save(root: Path, step: int, past: str = "") -> Path:
    return commit(*write(root, step, past))


def life(trainer: TrainerConfig, until: int, tell: Tell = silent) -> None:
    """What a run does to its folder from a start to its end, saving each step; tells each one that is complete."""
    root = Path(trainer.default_local_dir)
    start = select(trainer, MODELS)
    sweep(root)
    goes_on = start.path is not None and start.path.resolve().parent == root
    set_aside(root, after_step=start.step if goes_on else -1)
    for step in range(start.step + 1, until + 1):
        save(root, step)
        tell(step)
        remove_old(root, KEEP)


def auto(root: Path) -> TrainerConfig:
    return TrainerConfig(default_local_dir=str(root))


def steps(root: Path) -> list[int]:
    return [found.step for found in find(root)]


def assert_a_start_finds(root: Path, allowed: set[int]) -> None:
    """Of what is found everything is whole, nothing is skipped, the number in the file leads to one of them.

    allowed: which step may be the newest; 0: there may be none. Sweeping leaves these and nothing half done.
    """
    point = select(auto(root), MODELS)
    assert point.step in allowed and point.skipped == ()
    for found in find(root):
        assert broken_files(found.path, read_manifest(found.path), checksums=True) == []
        assert f"of step {found.step} " in (found.path / "run.json").read_text()
    if (root / LATEST).exists():
        assert int((root / LATEST).read_text()) in steps(root)
    before = steps(root)
    sweep(root)
    assert steps(root) == before and select(auto(root), MODELS).step == point.step
    named = [step for step in before if step_folder(root, step).exists()]
    assert not named or (root / LATEST).read_text() == str(named[0])
    left = [path.name for path in root.iterdir() if path.name.endswith(LEFTOVERS)]
    assert all(name.endswith(".replaced") and not (root / name.removesuffix(".replaced")).exists() for name in left)


def cut(file: Path, size: int) -> None:
    times = file.stat()
    os.truncate(file, size)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def aftermaths(root: Path, torn: Path | None) -> Iterator[Path]:
    """The folder as the death left it; then as it may be after a death inside of a write, and after a power cut.

    Names change in order, as on a file system with a journal; content that was not synced has gone.
    """
    yield shutil.copytree(root, root.with_name(f"{root.name}-whole"))
    if torn is not None and torn.exists():
        for size in {0, torn.stat().st_size // 2}:
            other = shutil.copytree(root, root.with_name(f"{root.name}-torn-{size}"))
            cut(other / torn.relative_to(root), size)
            yield other
    if unsynced(root):
        other = shutil.copytree(root, root.with_name(f"{root.name}-unsynced"))
        for file in unsynced(other):
            cut(file, 0)
        yield other


def prepared(place: Path, *saved: int) -> Callable[[int], Path]:
    """A folder for each attempt, with the checkpoints of some steps that were there before."""
    first = place / "before"
    first.mkdir()
    for step in saved:
        save(first, step, "before")
    sync_all(first)
    return lambda number: shutil.copytree(first, place / str(number))


def assert_death_does_no_harm(root: Path, torn: Path | None, allowed: set[int]) -> Path:
    """Whatever a write or a power cut left of the content, a start finds the same; the folder as that start has it."""
    whole, *others = aftermaths(root, torn)
    assert_a_start_finds(whole, allowed)
    expected = content(whole)
    for case in others:
        assert_a_start_finds(case, allowed)
        assert content(case) == expected
        shutil.rmtree(case)
    return whole


def test_a_life_may_end_at_any_instant(place):
    """From nothing to step 2, one kept: no step that was told is lost, and the next life ends as if there was none.

    Would not catch a disk that reorders names, or says that it has synced what it has not.
    """
    never_killed = place / "never"
    never_killed.mkdir()
    life(auto(never_killed), 3)
    expected, newest = content(never_killed), []
    for root, death in every_instant(lambda root, tell: life(auto(root), 2, tell), prepared(place)):
        told = int(death.told[-1]) if death.told else 0
        case = assert_death_does_no_harm(root, death.torn, {told, min(told + 1, 2)})
        newest.append(select(auto(case), MODELS).step)
        life(auto(case), 3)
        assert content(case) == expected
        shutil.rmtree(case)
    assert newest == sorted(newest) and set(newest) == {0, 1, 2} and len(newest) > 60


@pytest.mark.exhaustive
def test_a_life_that_leaves_a_past_may_end_at_any_instant(place):
    """From step 1 by its path, where 2 and 3 are of a past that is left: they stay whole, each under one of two names.

    The next life is told the same, or, where step 1 has been removed meanwhile, goes on from the newest. Would not
    catch a user who gives another path in between.
    """

    def trainer(root: Path) -> TrainerConfig:
        start = step_folder(root, 1)
        if not start.exists():
            return auto(root)
        folder = str(root)
        return TrainerConfig(default_local_dir=folder, resume_mode="resume_path", resume_from_path=str(start))

    prepare, instants = prepared(place, 1, 2, 3), 0
    left_behind = [content(step_folder(place / "before", step)) for step in (2, 3)]
    for root, death in every_instant(lambda root, tell: life(trainer(root), 2, tell), prepare):
        case = assert_death_does_no_harm(root, death.torn, {1, 2, 3})
        for _ in range(2):
            found = [content(path) for path in case.glob("global_step_*")]
            assert all(old in found for old in left_behind)
            life(trainer(case), 2)
        assert steps(case) == [2] and "before" not in (step_folder(case, 2) / "run.json").read_text()
        shutil.rmtree(case)
        instants += 1
    assert instants > 40


def test_a_step_is_replaced_at_one_instant(place):
    """Either the earlier or the later one, whole. Would not catch a reader that looks twice while it happens."""
    prepare, found = prepared(place, 3, 4), []
    for root, death in every_instant(lambda root, tell: tell(save(root, 4, "again").name), prepare):
        case = assert_death_does_no_harm(root, death.torn, {4})
        found.append("again" in (find(case)[0].path / "run.json").read_text())
        assert steps(case) == [4, 3] and (found[-1] or not death.told)
        save(case, 4, "at last")
        assert {path.name for path in case.iterdir()} == {"global_step_3", "global_step_4", LATEST}
    assert found == sorted(found) and set(found) == {False, True}


@pytest.mark.exhaustive
def test_old_ones_may_be_half_removed(place):
    """Three go, newest last. Would not catch a slow deletion by another host."""
    prepare, instants = prepared(place, 1, 2, 3, 4), 0
    for root, death in every_instant(lambda root, tell: remove_old(root, 1), prepare):
        case = assert_death_does_no_harm(root, death.torn, {4})
        remove_old(case, 1)
        assert {path.name for path in case.iterdir()} == {"global_step_4", LATEST}
        instants += 1
    assert instants > 20


@pytest.mark.exhaustive
def test_a_start_may_end_at_any_instant_too(place):
    """A run that died while it replaced and while it removed, and then again at every instant of the next sweep."""

    def half_done(root: Path) -> None:
        write(root, 9)
        for step, ending in ((1, ".deleted"), (3, ".replaced"), (5, ".replaced")):
            shutil.copytree(step_folder(root, 3), root / f"global_step_{step}{ending}")
        other = step_folder(root, 5).with_name("global_step_5.replaced") / MANIFEST
        other.write_text(other.read_text().replace('"step": 3', '"step": 5'))
        (root / f"{LATEST}.unfinished").write_text("9")

    prepare, instants = prepared(place, 3, 4), 0
    expected = {"global_step_3", "global_step_4", "global_step_5.replaced", LATEST}

    def prepare_half_done(number: int) -> Path:
        root = prepare(number)
        half_done(root)
        return root

    for root, _ in every_instant(lambda root, tell: sweep(root), prepare_half_done):
        assert steps(root) == [5, 4, 3]
        sweep(root)
        assert {path.name for path in root.iterdir()} == expected and (root / LATEST).read_text() == "4"
        instants += 1
    assert instants > 20


@pytest.mark.parametrize("checksums", [False, True])
def test_a_torn_file_is_noticed_wherever_it_ends(place, checksums):
    """Every file of the newest one cut to nothing, one byte, half, all but the last: the one before is taken.

    The manifest's last byte ends its line and is no content. Would not catch a byte that is lost and made up for.
    """
    for step in (1, 2):
        save(place, step)
    for name in (*FILES, MANIFEST):
        file = step_folder(place, 2) / name
        whole = file.read_bytes()
        last = len(whole) - (2 if name == MANIFEST else 1)
        for size in sorted({0, 1, len(whole) // 2, last}):
            file.write_bytes(whole[:size])
            point = select(auto(place), MODELS, checksums=checksums)
            assert point.step == 1 and len(point.skipped) == 1 and name in point.skipped[0], (name, size)
        file.write_bytes(whole)
    assert select(auto(place), MODELS, checksums=checksums).step == 2


def commit_before_the_manifest(unfinished: Path, manifest: Manifest) -> None:
    unfinished.rename(step_folder(unfinished.parent, manifest.step))
    (step_folder(unfinished.parent, manifest.step) / MANIFEST).write_text(manifest.to_json())


def commit_after_deleting(unfinished: Path, manifest: Manifest) -> None:
    shutil.rmtree(step_folder(unfinished.parent, manifest.step), ignore_errors=True)
    commit(unfinished, manifest)


def commit_of_what_is_not_synced(unfinished: Path, manifest: Manifest) -> None:
    run_file = unfinished / "run.json"
    run_file.write_text(run_file.read_text())
    commit(unfinished, manifest)


@pytest.mark.parametrize(
    ("wrong_commit", "before", "harm"),
    [
        (commit_before_the_manifest, (3,), "global_step_4: it has no manifest.json"),
        pytest.param(commit_after_deleting, (3, 4), "global_step_4: .* is missing", marks=pytest.mark.exhaustive),
        (commit_of_what_is_not_synced, (3, 4), "global_step_4: run.json has 0 bytes"),
    ],
)
def test_a_wrong_protocol_would_be_noticed(place, wrong_commit, before, harm):
    """The manifest last, the earlier one gone first, content only in memory. Would not catch a fourth mistake."""
    with pytest.raises(AssertionError, match=harm):
        for root, death in every_instant(lambda root, tell: wrong_commit(*write(root, 4)), prepared(place, *before)):
            assert_death_does_no_harm(root, death.torn, {4} if 4 in before else {3, 4})


def test_a_child_dies_where_it_is_told_to(place):
    """Before each of six operations, counted by hand; what was opened last may be torn. Reading is no operation."""

    def action(root: Path, tell: Tell) -> None:
        (root / "folder").mkdir()
        with (root / "folder/file").open("w") as file:
            file.write("text")
            file.flush()
            os.fsync(file.fileno())
        tell((root / "folder/file").read_text())
        (root / "folder/file").rename(root / "folder/other")
        (root / "folder/other").unlink()
        (root / "folder").rmdir()

    expected = [[], ["folder"], ["folder", "file"], ["folder", "file"], ["folder", "other"], ["folder"], []]
    deaths = []
    for number, names in enumerate(expected):
        root = place / str(number)
        root.mkdir()
        deaths.append(die_before(number, lambda tell, root=root: action(root, tell), root))
        assert sorted(path.name for path in root.rglob("*")) == sorted(names)
        assert [path.name for path in unsynced(root)] == (["file"] if number == 2 else [])
    assert [death.ended for death in deaths] == [False] * 6 + [True]
    assert [death.torn.name if death.torn else None for death in deaths] == [None, None, "file", *[None] * 4]
    assert [death.told for death in deaths] == [()] * 3 + [("text",)] * 4
    with pytest.raises(AssertionError, match="the action raised"):
        die_before(99, lambda tell: 1 / 0, place)
