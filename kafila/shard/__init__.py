"""One member's part of the model.

Importing any of it asks OpenMP, before torch loads it, to let threads sleep where they wait for each other. By default
they spin for milliseconds, which on a machine that also does something else takes the processor from the very thread
that is waited for: with two threads on two busy cores a SmolLM2 token took 200 ms spinning and 35 ms sleeping. Who sets
the variable already is left alone.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
