"""Fixtures of the knowledge base's tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for fakes.py, also used by the subprocesses of the tests

from colibri_rag import KnowledgeBase
from fakes import HashingEmbedder


@pytest.fixture
def embedder():
    return HashingEmbedder()


@pytest.fixture
def notes(tmp_path):
    """A small bilingual folder."""
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "cache.md").write_text(
        "# Expert cache\n\nThe option `--quant q4_k_m` chooses four bits.\n\n## Size\n\nThe `expert_cache` holds 64 experts per layer.\n"
        "It evicts the least recently used expert.\n",
        encoding="utf-8",
    )
    (folder / "garden.txt").write_text("Tomatoes need sun.\n\nWater the tomatoes every morning.\n", encoding="utf-8")
    chinese = "# 缓存\n\n专家缓存保存最近使用的专家。缓存大小由内存预算决定。\n\n# 猫\n\n黑猫喜欢在夜里散步。\n"
    (folder / "中文.md").write_text(chinese, encoding="utf-8")
    return folder


@pytest.fixture
def kb(tmp_path, embedder):
    with KnowledgeBase.open(tmp_path / "kb", embedder) as opened:
        yield opened
