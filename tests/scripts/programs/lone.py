"""Runs a program with variables of the environment that one rank alone has, as a machine set up otherwise would.

torchrun lone.py RANK NAME=VALUE program.py arguments...
"""

import os
import runpy
import sys

rank, setting, program, *arguments = sys.argv[1:]
if os.environ["RANK"] == rank:
    name, _, value = setting.partition("=")
    os.environ[name] = value
if "torch" in sys.modules:  # imported before the fork, without this
    sys.modules["torch"]._import_device_backends()
sys.argv = [program, *arguments]
runpy.run_path(program, run_name="__main__")
