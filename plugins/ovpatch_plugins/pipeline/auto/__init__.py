"""``schedule=auto``: costs are measured, orders solved and raced."""
