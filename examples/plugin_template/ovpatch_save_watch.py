"""The shortest ovpatch plugin: the report shows whether a process has called torch.save."""

import functools

import ovpatch


@ovpatch.hookimpl
def ovpatch_feature():
    return ovpatch.Feature("save_watch", "Shows whether torch.save was called.")


@ovpatch.hookimpl
def ovpatch_register(patches):
    patches.register_patch("torch.serialization.save", wrap=watch, why="torch has no hook")


def watch(original):
    return functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))
