"""``python -m kafila.demo``: have the demonstration checkpoint, and print the folder it is in."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kafila.demo import MODEL_NAME, default_folder
from kafila.demo.convert import convert, is_whole
from kafila.demo.source import installed_gguf
from kafila.errors import KafilaError


@click.command(help=f"Turn the GGUF file of {MODEL_NAME} into a checkpoint folder, once, and print that folder.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to; by default in the user's cache.")
@click.option("--gguf", type=click.Path(path_type=Path), help="The file; by default the installed package's.")
def main(output: Path | None, gguf: Path | None) -> None:
    folder = (output or default_folder()).absolute()
    try:
        if not is_whole(folder):  # then neither the package nor its reader is needed again
            convert(gguf or installed_gguf(), folder, lambda line: click.echo(line, err=True))
    except KafilaError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(folder)


if __name__ == "__main__":
    main(prog_name="python -m kafila.demo")
