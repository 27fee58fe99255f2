"""How long a test waits, by the real clock, for what will certainly come: on a machine with much else to do, too."""

PATIENCE_S = 25.0
"""Shorter than the timeouts of the local interface, so that none of them can stand in for what a test waits for."""
