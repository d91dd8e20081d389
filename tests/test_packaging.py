"""A wheel holds everything, says the right things about itself and works from where pip puts it."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support import patience

ROOT = Path(__file__).resolve().parent.parent
# The names of packages by their folders.
PACKAGES = {
    "ovpatch": "ovpatch",
    "plugins/ovpatch_plugins": "ovpatch_plugins",
}

pytestmark = pytest.mark.slow


def run(*command, **kwargs):
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=patience.scale(120),
        **kwargs,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, so that no earlier build in the tree can lend it files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for folder in PACKAGES:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source))
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def dist_info(wheel):
    """Read a file of the wheel's dist-info folder."""
    archive = zipfile.ZipFile(wheel)

    def read(name):
        (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()

    yield read
    archive.close()


@pytest.fixture(scope="module")
def metadata(dist_info):
    return Parser().parsestr(dist_info("METADATA"))


def test_every_module_and_type_marker_is_in_the_wheel(names):
    for folder, package in PACKAGES.items():
        files = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")} | {
            Path("py.typed")
        }
        missing = {f"{package}/{file.as_posix()}" for file in files} - names
        assert not missing, "a folder of the package has no __init__.py"


def test_nothing_but_the_two_packages_is_in_the_wheel(names):
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES.values())


def test_entry_points_of_all_three_groups(dist_info):
    points = configparser.ConfigParser()
    points.read_string(dist_info("entry_points.txt"))
    assert points["ovpatch"]["ddp"] == "ovpatch_plugins.ddp.ddp_feature:hooks"
    assert points["console_scripts"]["ovpatch"] == "ovpatch.cli.main:main"
    assert points["torch.backends"]["ovpatch"].startswith("ovpatch.autoload:")


def test_every_feature_folder_has_an_entry_point(dist_info):
    points = configparser.ConfigParser()
    points.read_string(dist_info("entry_points.txt"))
    features = {
        path.parent.name for path in (ROOT / "plugins" / "ovpatch_plugins").glob("*/*_feature.py")
    }
    assert features <= set(points["ovpatch"])


def test_licence(metadata, dist_info):
    assert (metadata["License-Expression"] or metadata["License"]) == "Apache-2.0"
    assert "Apache License" in dist_info("licenses/LICENSE")


def test_torch_is_required_without_a_version_so_that_pip_never_replaces_it(metadata):
    requirements = {
        r.name: r for r in map(Requirement, metadata.get_all("Requires-Dist")) if r.marker is None
    }
    assert set(requirements) == {"torch", "wrapt", "pluggy", "packaging", "rich"}
    assert not requirements["torch"].specifier
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"plot", "test", "integration"} <= set(metadata.get_all("Provides-Extra"))


def test_the_index_page_has_no_link_into_the_repository(metadata):
    text = metadata.get_payload() or metadata["Description"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# ovpatch" in text
    assert all(re.match("[a-z]+:", target) for target in re.findall(r"\]\(([^)]*)\)", text))
    assert not re.search(r"^!\w", text, re.MULTILINE), "the text of a picture remains"


def test_the_source_distribution_has_all_that_its_tests_need(tmp_path):
    """What git tracks is in it; tests run from it (CONTRIBUTING.md, Release)."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    source = tmp_path / "source"
    for name in listed.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(source))
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing = {
        name for name in listed.splitlines() if name not in held and not name.startswith(".")
    }
    assert not missing, "add them to MANIFEST.in"
    assert not [name for name in held if name.endswith(".pyc")]


def test_the_environment_of_the_tests_has_the_libraries_that_programs_need(metadata):
    bootstrap = (ROOT / "tools" / "bootstrap.sh").read_text()
    assert re.search(r'^pip install .* --editable "\.\[\$EXTRAS\]"', bootstrap, re.MULTILINE)
    assert "EXTRAS=${EXTRAS:-test,integration}" in bootstrap
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    extra = {
        r.name for r in requirements if r.marker and r.marker.evaluate({"extra": "integration"})
    }
    calls = [
        call
        for path in (ROOT / "tests" / "scripts").glob("test_*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "needs"
    ]
    needed = {ast.literal_eval(name) for call in calls for name in call.args}
    # tests/plugins/megatron runs only with megatron-core.
    assert needed | {"megatron-core"} == extra


def test_the_installed_wheel_imports_and_is_found_by_torch(wheel, tmp_path):
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), str(wheel))
    code = (
        "import torch, ovpatch_plugins.ddp.ddp_feature as plugin, ovpatch\n"
        "from importlib.metadata import distribution\n"
        "print(plugin.__file__); print(ovpatch.__file__)\n"
        "assert ovpatch.__version__ == distribution('ovpatch').version\n"
        "assert ovpatch.apply()['ddp'].state == 'applied'\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("OVPATCH")}
    out = run("-c", code, env={**env, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert all(Path(line).is_relative_to(tmp_path) for line in out.splitlines())
    assert len(out.splitlines()) == 2
