"""From wishes to features that are on: finding plugins, deciding, patching, taking back."""
