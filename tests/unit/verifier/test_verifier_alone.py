"""The verifier by itself: what it imports, its command, and the executable archive without network and database."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.verifier.__main__ import UsageError, main, run
from engine.verifier.build import archive
from tests.support.bundles import RUN, Record, whole_record

PACKAGE = Path(__file__).parents[3] / "engine" / "verifier"
# Run in the child before the verifier: everything that could reach the outside raises.
DENIED = """
import sys, socket, runpy
def refuse(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "sqlite3.", "urllib.")):
        raise RuntimeError("the verifier reached for " + event)
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise RuntimeError("the verifier wrote a file")
sys.addaudithook(refuse)
try:
    socket.socket()
except RuntimeError:
    pass
else:
    raise SystemExit("sockets are not denied")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    return names


def test_it_imports_the_standard_library_cryptography_and_itself() -> None:
    sources = sorted(PACKAGE.glob("*.py"))
    assert len(sources) > 10
    for source in sources:
        for name in imported(ast.parse(source.read_text())):
            top = name.split(".")[0]
            allowed = top in sys.stdlib_module_names or top == "cryptography" or name.startswith("engine.verifier.")
            assert allowed or name == "engine.verifier", f"{source.name} imports {name}"
            assert top not in {"socket", "http", "urllib", "subprocess", "sqlite3", "asyncio", "ssl"}, name


def write(folder: Path, record: Record) -> dict[str, str]:
    """A bundle, the trust file and a saved checkpoint as files."""
    files = {
        "bundle": folder / "bundle.zip",
        "trust": folder / "key",
        "saved": folder / "saved",
        "other": folder / "other",
    }
    files["bundle"].write_bytes(record.bundle())
    files["trust"].write_text(f"# the log's key\n{record.verifier}\n")
    files["saved"].write_bytes(record.checkpoints[0][1])
    files["other"].write_text(f"{Record(7).verifier}\n")
    return {name: str(path) for name, path in files.items()}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return write(tmp_path, whole_record())


def test_the_command_says_valid_and_answers(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [files["bundle"], "--trust", files["trust"], "--checkpoint", files["saved"]]
    assert main([*arguments, "--who-saw", str(RUN), "0", "--who-approved", str(RUN)[:23], "answer"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("VALID\n")
    assert "never shown to worker gamma" in said
    assert "nobody: no review of it is on record" in said


def test_the_command_speaks_json(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([files["bundle"], "--trust", files["trust"], "--json", "--who-saw", str(RUN), "0"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "valid"
    assert said["answers"][0]["question"] == "who-saw"


def test_the_command_says_invalid_and_answers_nothing(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([files["bundle"], "--trust", files["other"], "--who-saw", str(RUN), "0"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "INVALID\n\n  log: log/checkpoint: no trusted key signed the note; it names as its signer key "
    )
    assert f"signer key {whole_record().verifier.key_id}\n" in said
    assert "several --trust add up" in said
    assert "0 runs" not in said
    assert "not covered" not in said
    assert "Who was shown" not in said


def test_a_file_that_is_no_bundle_is_invalid(files: dict[str, str], tmp_path: Path) -> None:
    for content in (b"", b"PK", b"x" * 1000, Path(files["trust"]).read_bytes()):
        (tmp_path / "no-bundle").write_bytes(content)
        assert main([str(tmp_path / "no-bundle"), "--trust", files["trust"]]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["bundle", "--trust", "missing"],
        ["missing", "--trust", "trust"],
        ["bundle", "--trust", "bundle"],
        ["bundle", "--trust", "trust", "--checkpoint", "missing"],
        ["bundle", "--trust", "trust", "--checkpoint", "trust"],
        ["bundle", "--trust", "trust", "--checkpoint", "bundle"],
        ["bundle", "--trust", "trust", "--who-saw", "ffff", "0"],
        ["bundle", "--trust", "trust", "--who-approved", str(RUN), "9"],
    ],
)
def test_what_cannot_be_done_is_usage(
    files: dict[str, str], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {**files, "missing": files["bundle"] + ".missing"}
    assert main([names.get(one, one) for one in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.splitlines()[1].startswith("hint: ")
    assert said.err.count("\n") == 2


def test_usage_is_an_exception_for_programs(files: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        run(Path(files["bundle"]), trust=[Path(files["bundle"])])


def alone(pyz: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-c", DENIED, str(pyz), *arguments],
        cwd=pyz.parent,
        env={},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_executable_archive_needs_neither_podium_nor_network_nor_database(
    files: dict[str, str], tmp_path: Path
) -> None:
    pyz = tmp_path / "podium-verify.pyz"
    pyz.write_bytes(archive())
    assert archive() == pyz.read_bytes()
    done = alone(pyz, files["bundle"], "--trust", files["trust"], "--checkpoint", files["saved"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("VALID\n")
    bundle = bytearray(Path(files["bundle"]).read_bytes())
    bundle[len(bundle) // 2] ^= 1
    Path(files["bundle"]).write_bytes(bundle)
    done = alone(pyz, files["bundle"], "--trust", files["trust"])
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("INVALID\n")
    done = alone(pyz)
    assert done.returncode == 2


def test_the_archive_holds_nothing_but_the_verifier(tmp_path: Path) -> None:
    import zipfile

    pyz = tmp_path / "podium-verify.pyz"
    pyz.write_bytes(archive())
    with zipfile.ZipFile(pyz) as file:
        names = set(file.namelist())
    assert {"__main__.py", "engine/__init__.py", "engine/verifier/verify.py"} <= names
    assert all(name.startswith(("engine/verifier/", "__main__.py", "engine/__init__.py")) for name in names)
