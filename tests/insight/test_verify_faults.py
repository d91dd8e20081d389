"""Faults that a feature could have: each is found, at its first step, in its first value, on its rank."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ovpatch.insight import variants
from ovpatch.insight.verify import recording
from ovpatch.insight.verify.compare import RunComparison, compare_runs
from ovpatch.insight.verify.verification import WORKER, Request
from tests.insight import faults
from tests.support.environment import cleaned, free_port
from tests.support.fake_plugins import Site
from tests.support.preloaded import preloaded

pytestmark = pytest.mark.slow


@dataclass
class Variants:
    """Runs of the script with one feature, or stock, once for all tests."""

    request: Request

    def run(self, name: str, features: str = variants.STOCK) -> variants.Outcome:
        variant = self.request.make_variant(name, features)
        outcome = variants.run_variant(
            variant, self.request.command, WORKER, self.request.out, timeout=60.0
        )
        assert outcome.code == 0, outcome.read_failure()
        return outcome

    def read(self, name: str) -> recording.RecordedRun:
        return recording.read_recorded(self.request.out / name)

    def compare(self, *faults: str) -> RunComparison:
        name = "-".join(faults)
        outcome = self.run(name, ",".join(faults))
        assert sorted(outcome.exercised) == sorted(faults)
        return compare_runs(self.read("stock"), self.read(name))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "train.py").write_text(faults.SCRIPT)
    faults.install(Site(folder))
    with pytest.MonkeyPatch.context() as patch:
        cleaned(patch, PYTHONPATH=str(folder))
        command = [*preloaded(), str(folder / "train.py"), str(free_port())]
        made = Variants(Request(command, folder / "out", steps=10))
        made.run("stock")
        yield made


def first_of(compared):
    first = compared.first
    assert first is not None
    return first.step, first.process, first.row.name


def names(compared):
    return {(finding.process, finding.row.name) for finding in compared.different}


def test_a_feature_that_does_nothing_changes_no_bit_and_all_is_compared(ran):
    compared = ran.compare("harmless")
    assert compared.findings == []
    assert compared.processes == ["rank 0", "rank 1"]
    assert compared.steps == 3  # one of the four turns was skipped
    assert compared.events == {"backward": 16, "step": 6, "scale": 8, "checkpoint": 1}


def test_gradients_divided_twice(ran):
    compared = ran.compare("divided_twice")
    assert first_of(compared) == (2, "rank 0", "gradient 0.weight")
    assert ("rank 1", "norm of gradients") in names(compared)


def test_a_stale_parameter_on_one_rank(ran):
    compared = ran.compare("stale")
    assert first_of(compared) == (2, "rank 1", "parameter 2.weight")
    at_once = [
        finding.row.name
        for finding in compared.different
        if (finding.step, finding.process) == (2, "rank 1")
    ]
    assert at_once == ["parameter 2.weight"]


def test_a_skip_on_one_rank_alone(ran):
    first = ran.compare("wrong_skip").first
    assert (first.process, first.step, first.row.name) == ("rank 1", 2, "order of events")
    assert first.row.note == "stock: step 2 of optimizer 0 (SGD); patched: GradScaler.update()"


def test_a_checkpoint_of_another_dtype_and_later_a_random_number_drawn_too_many(ran):
    compared = ran.compare("wrong_dtype", "disturbed")
    saved = [
        finding for finding in compared.different if finding.event == "a checkpoint (model.pt)"
    ]
    rows = {finding.row.name: finding.row.note for finding in saved}
    assert rows["saved model.module.0.weight"] == "float32 [40, 8] became float16 [40, 8]"
    assert {finding.process for finding in saved} == {"rank 0"}
    later = [finding for finding in compared.different if finding not in saved]
    assert {finding.step for finding in later} == {3}
    assert {("rank 1", "random.torch"), ("rank 1", "random.python")} & names(compared) == {
        ("rank 1", "random.torch")
    }
    # The dropout before the loss drew other numbers.
    assert later[0].row.name == "loss"
