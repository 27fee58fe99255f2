"""``kafila-sim``: plan for machines nobody has at hand, and run the deployed code in virtual time.

The group is kept small: each verb lives in a file of its own and is added here.
"""

from __future__ import annotations

import click

from kafila.errors import KafilaError
from sims.fleet_cli import fleet
from sims.nat_cli import nat
from sims.plan_cli import plan
from sims.report_cli import report


class _Verbs(click.Group):
    """Errors fit for a person end a command in one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KafilaError as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Verbs)
def main() -> None:
    """Plan and simulate Kafila sessions."""


main.add_command(plan)
main.add_command(nat)
main.add_command(fleet)
main.add_command(report)
