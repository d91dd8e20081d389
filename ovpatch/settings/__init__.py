"""What the user wants: the variable OVPATCH, switches and options from the environment, arguments of apply()."""
