"""The names of a checkpoint's files besides its weights, and of what a cache keeps beside them."""

from __future__ import annotations

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
LANGUAGE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What the head reads besides; all but the first may be absent."""
ABSENT_SUFFIX = ".absent"
"""Stands for a file that the source does not have."""
