"""Files are refused before the work, and errors are one message and an exit code."""

import os
from pathlib import Path

import pytest

from cad_jax import plan_command, profile_command, server_speeds, simulate_steps, topologies
from cad_jax.__main__ import main
from cad_jax.command_line import check_number, check_outputs, run_command, writing
from cad_jax.config import RunConfig
from tests.tiny_runs import tiny_config, with_changes


@pytest.mark.parametrize("name", ["new.txt", "old.txt"])
def test_a_check_leaves_no_trace(tmp_path: Path, name: str) -> None:
    (tmp_path / "old.txt").write_text("kept")
    check_outputs({"--json": tmp_path / name, "--trace": None})
    assert [p.name for p in tmp_path.iterdir()] == ["old.txt"]
    assert (tmp_path / "old.txt").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/x.json", "cannot write .*x.json: make the folder .*no first"),
        (".", r"cannot be written \(Is a directory\): name another file"),
        ("x" * 300, r"cannot be written \(File name too long\): name another file"),
        ("file/x.json", "make the folder .*file first"),
        ("ünï\N{SNOWMAN}/x", "make the folder .*ünï\N{SNOWMAN} first"),
    ],
)
def test_files_that_cannot_be_written(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        check_outputs({"--json": tmp_path / name})


def test_a_file_has_one_purpose(tmp_path: Path) -> None:
    read, out = tmp_path / "lengths.txt", tmp_path / "a.json"
    read.touch()
    (tmp_path / "link").symlink_to(read)
    with pytest.raises(ValueError, match="--json .* and is the file that is read as well"):
        check_outputs({"--json": tmp_path / "link"}, [None, read])
    with pytest.raises(ValueError, match="--trace .* and is --json as well: name another file"):
        check_outputs({"--json": out, "--trace": out})
    with pytest.raises(ValueError, match="must name a file that ends in .png: add that"):
        check_outputs({"--plot": out})
    check_outputs({"--json": Path(os.devnull), "--trace": Path(os.devnull)})


def test_writing_leaves_nothing_half_written_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    for error, expected in ((OSError(28, "No space left on device"), ValueError), (KeyboardInterrupt(), KeyboardInterrupt)):  # fmt: skip
        with pytest.raises(expected) as raised, writing(path) as file:
            file.write_text("half")
            raise error
        assert not path.exists()
        if expected is ValueError:
            assert f"{path} cannot be written (No space left on device)" in str(raised.value)


@pytest.mark.parametrize("linked", [False, True])
def test_what_a_file_had_survives_a_failure(tmp_path: Path, linked: bool) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    kept.chmod(0o600)
    path = tmp_path / "link.json" if linked else kept
    if linked:
        path.symlink_to(kept)
    names = sorted(p.name for p in tmp_path.iterdir())
    for begun in (False, True):
        with pytest.raises(KeyError), writing(path) as file:
            if begun:
                file.write_text("half")
            raise KeyError
        assert kept.read_text() == "old"
    with writing(path) as file:
        assert file.suffix == ".json"  # a plot's format follows it
        file.write_text("new")
        assert kept.read_text() == "old"
    assert kept.read_text() == "new" and kept.stat().st_mode & 0o777 == 0o600
    assert path.is_symlink() == linked and sorted(p.name for p in tmp_path.iterdir()) == names


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no files of open descriptors")
def test_what_a_descriptor_holds_is_never_replaced(tmp_path: Path) -> None:
    """A shell's `--json /dev/stdout > file`: another file in its place would lose what follows."""
    with (tmp_path / "out").open("w") as out:
        with writing(Path(f"/dev/fd/{out.fileno()}")) as path:
            path.write_text("figures")
        assert os.path.samestat(os.fstat(out.fileno()), (tmp_path / "out").stat())
    assert (tmp_path / "out").read_text() == "figures"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_named() -> None:
    full = Path("/dev/full")
    check_outputs({"--json": full})
    with (
        pytest.raises(ValueError, match=r"/dev/full cannot be written \(No space left"),
        writing(full) as path,
    ):
        path.write_text("x" * 100_000)
    assert full.exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("rule, value: cure"), "cad-jax plan: rule, value: cure\n"),
        (
            MemoryError(),
            "cad-jax plan: the memory does not hold this (out of memory): use fewer",
        ),
        (OSError(13, "Permission denied", "a.txt"), "a.txt cannot be used (Permission denied)"),
        (OSError("odd"), "cad-jax plan: a file cannot be used (odd): name"),
    ],
)
def test_what_stops_a_command_is_one_message(error, message, capsys) -> None:
    def work() -> None:
        raise error

    assert run_command("plan", work) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
    assert run_command("plan", lambda: None) == 0


def test_an_interrupt_is_one_message(monkeypatch, capsys) -> None:
    def interrupted(args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "run", interrupted)
    pool = ["--lengths", "x", "--servers", "2", "--tokens-per-server", "64"]
    assert main(["plan", *pool]) == 130
    assert capsys.readouterr().err == "cad-jax plan: interrupted\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 10**30])
def test_numbers_have_bounds(value: float) -> None:
    with pytest.raises(ValueError, match=r"--n must be at least 0 and at most 1.5, got .*: use 1"):
        check_number("--n", value, 0, 1.5, "use 1")
    check_number("--n", None, 0, 1.5, "use 1")


POOL = ["--tokens-per-rank", "1024", "--ranks", "2", "--workload", "mixed"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--lengths", "LENGTHS", "--servers", "2", "--tokens-per-server", "64", "--json"],
        ["simulate", *POOL, "--json"],
        ["simulate", *POOL, "--trace"],
        ["simulate", *POOL, "--plot"],
        ["advise", "--lengths", "LENGTHS", "--topology", "h200:1x8", "--json"],
        ["profile", "--quick", "--out"],
    ],
    ids=lambda a: f"{a[0]} {a[-1]}",
)
def test_every_command_refuses_a_folder_before_its_work(
    arguments, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "lengths.txt").write_text("100\n")
    (tmp_path / "folder.png").mkdir()
    arguments = [str(tmp_path / "lengths.txt") if a == "LENGTHS" else a for a in arguments]
    # The work would be minutes, or need a compiler.
    monkeypatch.setattr(profile_command, "measurements", None)
    monkeypatch.setattr(simulate_steps, "drawn_steps", None)
    assert main([*arguments, str(tmp_path / "folder.png")]) == 2
    error = capsys.readouterr().err
    assert "folder.png cannot be written (Is a directory): name another file" in error
    assert error.startswith(f"cad-jax {arguments[0]}: ") and error.count("\n") == 1


@pytest.fixture
def inputs(tmp_path: Path) -> RunConfig:
    """A run that reads four files of one's own."""
    for name in ("a.txt", "b.txt", "tokenizer.json", "p.csv", "speeds.txt"):
        (tmp_path / name).write_text("kept")
    return with_changes(
        tiny_config(tmp_path, str(tmp_path / "?.txt")),
        data={"tokenizer": str(tmp_path / "tokenizer.json")},
        attention={"profile": str(tmp_path / "p.csv"), "speeds": str(tmp_path / "speeds.txt")},
    )


def test_a_recipe_names_its_files(inputs: RunConfig, tmp_path: Path) -> None:
    names = [path.relative_to(tmp_path).name for path in inputs.input_files()]
    assert names == ["a.txt", "b.txt", "tokenizer.json", "p.csv", "speeds.txt"]
    partly = with_changes(inputs, data={"paths": (str(tmp_path / "no*"), str(tmp_path / "b.txt"))})
    assert next(partly.input_files()) == tmp_path / "b.txt"
    plain = with_changes(
        inputs, data={"source": "stdlib", "paths": (), "tokenizer": "byte"},
        attention={"profile": "cpu", "speeds": None},
    )  # fmt: skip
    assert Path(os.__file__).resolve() in [path.resolve() for path in plain.input_files()]
    assert all(path.suffix == ".py" for path in plain.input_files())


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["compile", "--topology", "h200:1x8", "--json"], ["a.txt", "tokenizer.json", "p.csv", "speeds.txt"]),
        (["lengths", "--out"], ["a.txt", "tokenizer.json"]),
        (["speeds", "--out"], ["a.txt", "tokenizer.json", "p.csv"]),
    ],
    ids=lambda a: a[0],
)  # fmt: skip
def test_what_a_recipe_reads_is_not_written(
    command, kept, inputs: RunConfig, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "speeds.txt").write_text("1\n" * 4)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    # The work that would follow.
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(server_speeds, "measure", None)
    options = [
        "--data.paths", str(tmp_path / "?.txt"), "--data.tokenizer", inputs.data.tokenizer,
        "--attention.profile", str(inputs.attention.profile),
        "--attention.speeds", str(inputs.attention.speeds),
    ]  # fmt: skip
    for name in kept:
        out = str(tmp_path / name)
        arguments = [command[0], "text_folder", *options, *command[1:], out]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert f"{out}) must name a file of its own, and is the file that is read" in error, error
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
