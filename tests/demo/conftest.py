from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.demo.small import gguf_tensors, network, write_gguf


@pytest.fixture(scope="module")
def model() -> transformers.LlamaForCausalLM:
    return network(tied=True, biased=False)


@pytest.fixture(scope="module")
def small_gguf(model: transformers.LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", gguf_tensors(model))
