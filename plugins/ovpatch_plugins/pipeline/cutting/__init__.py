"""``cut()``: stages of a plain model. Works without ``apply()``."""
