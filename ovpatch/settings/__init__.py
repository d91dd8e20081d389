"""Settings: the variable OVPATCH, switches and options from the environment, arguments of ``apply()``."""
