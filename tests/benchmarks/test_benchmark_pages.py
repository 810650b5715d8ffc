"""The pages that benchmarks write equal the measured results."""

from __future__ import annotations

import json
from pathlib import Path

import cluster
import pytest
import ring_vs_tree_page as page
from ring_vs_tree import PARTS, RESULTS

pytestmark = pytest.mark.pure


def test_cluster_tables_equal_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = cluster.PAGE.read_text()
    written = tmp_path / "page.md"
    written.write_text(committed)
    monkeypatch.setattr(cluster, "PAGE", written)
    cluster.write_tables(json.loads(cluster.RESULTS.read_text()))
    assert written.read_text() == committed


def test_page_equals_its_measured_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the page is written again from its results, it is the same, and its plots are drawn."""
    committed = page.PAGE.read_text()
    written = tmp_path / "page.md"
    written.write_text(committed)
    monkeypatch.setattr(page, "PAGE", written)
    monkeypatch.setattr(page, "FIGURES", tmp_path)
    found = json.loads(RESULTS.read_text())
    page.write_page(found)
    assert written.read_text() == committed
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn
    assert all(f"(../figures/{name})" in written.read_text() for name in drawn)
    assert set(found) == set(PARTS)
