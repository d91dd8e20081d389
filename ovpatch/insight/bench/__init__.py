"""``ovpatch bench``: stock and patched runs in turn, the time of each step, and whether the two differ."""
