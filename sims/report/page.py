"""A page of headings, paragraphs, tables and plots, as Markdown and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from kafila.errors import UsageError

_CSS = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:left}"
    "th{background:#f2f2f2}svg{width:100%;height:auto}"
)


@dataclass(frozen=True, slots=True)
class Heading:
    """A section begins."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Plain words."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """An SVG in a file of its own."""

    name: str
    svg: str
    caption: str


Block = Heading | Paragraph | Table | Plot


@dataclass(slots=True)
class Page:
    """Blocks in order, and every number by name."""

    title: str
    blocks: list[Block] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def add(self, *blocks: Block) -> None:
        """At the end."""
        self.blocks += blocks

    def markdown(self) -> str:
        """The page; plots are files beside it."""
        parts = [f"# {self.title}"]
        for block in self.blocks:
            match block:
                case Heading(text, level):
                    parts.append(f"{'#' * level} {text}")
                case Paragraph(text):
                    parts.append(text)
                case Table(header, rows):
                    parts.append("\n".join([_row(header), _row(["---"] * len(header)), *map(_row, rows)]))
                case Plot(name, _, caption):
                    parts.append(f"![{caption}]({name}.svg)\n\n*{caption}*")
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """The page, plots inside."""
        parts = [
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>',
            f"<style>{_CSS}</style></head><body>\n<h1>{escape(self.title)}</h1>",
        ]
        for block in self.blocks:
            match block:
                case Heading(text, level):
                    parts.append(f"<h{level}>{escape(text)}</h{level}>")
                case Paragraph(text):
                    parts.append(f"<p>{escape(text)}</p>")
                case Table(header, rows):
                    parts.append(_html_table(header, rows))
                case Plot(_, svg, caption):
                    parts.append(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")
        return "\n".join([*parts, "</body></html>", ""])

    def write(self, folder: Path) -> list[Path]:
        """``report.md``, ``report.html`` and the plots. Raises UsageError where they cannot be written."""
        files = {"report.md": self.markdown(), "report.html": self.html()}
        files |= {f"{block.name}.svg": block.svg for block in self.blocks if isinstance(block, Plot)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{folder}: the report cannot be written there ({error.strerror})") from None
        return [folder / name for name in files]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"
