"""colibri-convert at the command line: what it prints, its exit codes, and how fast it answers --help."""

import json
import subprocess
import sys
from pathlib import Path

import colibri_converter
import pytest
from click.testing import CliRunner
from colibri_cli.commands import convert as command

from libcolibri.format import read_manifest

TINY = Path(__file__).parent.parent / "fixtures" / "tiny"


def run(*arguments):
    return CliRunner().invoke(command.main, [str(argument) for argument in arguments])


def test_the_choices_are_the_converters_recipes():
    assert command.QUANT_TYPES == colibri_converter.RECIPES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGU", "too short for a checkpoint (3 bytes)"),
        (b"", "too short"),
        (b"PK\x03\x04", "it begins with b'PK\\x03\\x04', expected b'GGUF'"),
    ],
)
def test_a_file_that_is_no_checkpoint(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content)
    result = run("--input", tmp_path / "m.gguf", "--output", tmp_path / "out")
    assert result.exit_code == 1 and message in result.stderr


def test_a_conversion_reports_in_lines(tmp_path):
    result = run("--input", TINY / "mixtral", "--output", tmp_path / "模型", "--quant", "q8_0", "--no-tokenizer")
    assert result.exit_code == 0
    assert "mixtral decoder" in result.stdout
    assert "f16 instead of q8_0" in result.stdout
    assert "and 27 more" in result.stdout
    assert read_manifest(tmp_path / "模型").tokenizer is None


def test_a_conversion_reports_in_json(tmp_path):
    result = run("--input", TINY / "llama", "--output", tmp_path / "m", "--no-tokenizer", "--json")
    facts = json.loads(result.stdout)
    assert (facts["recipe"], facts["family"]) == ("q4_k_m", "llama")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--input", TINY / "llama"], 1, "--no-tokenizer"),
        (["--input", TINY, "--no-tokenizer"], 1, "config.json: missing"),
        (["--input", TINY / "llama", "--quant", "q2"], 2, "'q2' is not one of"),
    ],
)
def test_mistakes_are_one_line_and_a_code(tmp_path, arguments, code, text):
    result = run(*arguments, "--output", tmp_path / "m")
    assert result.exit_code == code
    assert text in result.stderr
    assert code == 2 or result.stderr.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_help_imports_neither_numpy_nor_numba():
    script = (
        "import sys, colibri_cli.commands.convert; sys.exit(any(name in sys.modules for name in ('numpy', 'numba', 'colibri_converter')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
