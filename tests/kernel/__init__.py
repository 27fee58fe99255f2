"""The deployed programs on the real kernel's network stack, behind real NATs."""
