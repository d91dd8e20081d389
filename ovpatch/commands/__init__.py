"""The commands of ``ovpatch``, one module each."""
