"""TorchScript, where torch has it.

Between two matrices a token needs some twenty tiny operations. While weights stream through the caches each costs
about 5 us when called from Python (the interpreter and the dispatcher have been evicted since the last one) and 2 us
from TorchScript, and a call of a packed matrix 30 against 9; for SmolLM2 on one thread that is 23 ms against 18.5 a
token. torch calls TorchScript deprecated and names ``torch.compile`` its successor, which needs a C++ compiler on the
user's machine and minutes at start. So what is compiled are ordinary functions: where torch no longer scripts them they
run as they stand, with the same numbers.

A file of such functions has no ``from __future__ import annotations``: TorchScript reads the annotations. And there is
no ``type: ignore`` within a compiled function: TorchScript takes it for a signature.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """``function`` as TorchScript, or itself where torch cannot."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*", category=FutureWarning)
        try:
            return torch.jit.script(function)  # type: ignore[no-any-return,no-untyped-call,attr-defined,unused-ignore]  # untyped in some versions
        except (AttributeError, NotImplementedError, OSError, RuntimeError, TypeError):
            return function
