"""The planner's walls: nothing comes in but the standard library and the package's shared values."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import kafila.plan

IMPURE = {"asyncio", "os", "pathlib", "random", "secrets", "select", "socket", "subprocess", "threading", "time"}


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module or ""


def test_the_room_imports_the_standard_library_types_and_errors_alone() -> None:
    assert kafila.plan.__file__ is not None
    for path in Path(kafila.plan.__file__).parent.glob("*.py"):
        for name in imports(path.read_text(encoding="utf-8")):
            if name.startswith("kafila"):
                assert name in {"kafila.types", "kafila.errors"} or name.startswith("kafila.plan"), path
            else:
                assert name.split(".", maxsplit=1)[0] in sys.stdlib_module_names - IMPURE, path
