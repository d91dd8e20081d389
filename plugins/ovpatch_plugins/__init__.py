"""The features that come with ovpatch, one package each, found by entry point as all plugins are."""
