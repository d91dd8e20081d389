"""Whether a script computes the same stock and patched: both are run, watched and compared step by step."""
