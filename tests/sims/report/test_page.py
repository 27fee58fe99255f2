"""A page says the same in both formats, and what it cannot write in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafila.errors import UsageError
from sims.report.page import Heading, Page, Paragraph, Plot, Table


def page() -> Page:
    made = Page("Title <1>")
    made.add(
        Heading("Part"), Paragraph("a & b"), Table(("x", "y"), [("1|2", "<3>")]), Plot("plot", "<svg></svg>", "what")
    )
    return made


def test_markdown() -> None:
    text = page().markdown()
    assert text.startswith("# Title <1>\n\n## Part\n\na & b\n\n| x | y |\n| --- | --- |\n| 1\\|2 | <3> |\n")
    assert "![what](plot.svg)" in text


def test_html_escapes_words_and_holds_the_plots() -> None:
    text = page().html()
    assert "<h1>Title &lt;1&gt;</h1>" in text
    assert "<p>a &amp; b</p>" in text
    assert "<td>1|2</td><td>&lt;3&gt;</td>" in text
    assert "<figure><svg></svg><figcaption>what</figcaption></figure>" in text


def test_every_file_is_written(tmp_path: Path) -> None:
    written = page().write(tmp_path / "new" / "folder")
    assert [file.name for file in written] == ["report.md", "report.html", "plot.svg"]
    assert all(file.read_text() for file in written)


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        page().write(tmp_path / "file")
