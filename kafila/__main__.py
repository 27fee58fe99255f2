"""``python -m kafila`` is ``kafila-node``."""

from kafila.cli import node

if __name__ == "__main__":
    node(prog_name="kafila-node")
