"""The features that come with ovpatch, one package each, found by entry point like anybody else's."""
