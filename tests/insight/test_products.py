"""The noise run of matrix products: their sums in pieces, for whatever computes them."""

from __future__ import annotations

import subprocess

from tests.support.preloaded import preloaded

# What is replaced is replaced for the rest of a process.
PROGRAM = """
import warnings
import torch
from ovpatch.insight.verify import noise_runs

warnings.simplefilter("error")

def values():
    torch.manual_seed(0)
    a, b, c = torch.randn(30, 200), torch.randn(200, 40), torch.randn(40)
    found = [a @ b, torch.addmm(c, a, b), torch.addmm(c, a, b, beta=0.5, alpha=2.0), torch.addmm(c, a, b, beta=0)]
    found += [torch.mm(a, b, out=torch.empty(0)), torch.addmm(c, a, b, beta=3, out=torch.empty(30, 40))]
    for called in (lambda layer: layer, lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer, x = torch.nn.Linear(200, 40), torch.randn(3, 30, 200, requires_grad=True)
        y = called(layer)(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, layer.weight.grad]
    must_move = len(found)
    with torch.inference_mode():
        found.append(layer(x.detach()))
    with torch.autocast("cpu", torch.bfloat16):
        found.append(a @ b)
    found += [layer.bias.grad, a[:, :0] @ b[:0], a[:, :1] @ b[:1], a[:0] @ b, b.t() @ a.t()]
    found += [(a > 0).long() @ (b > 0).long(), (a.to(torch.complex64) * 1j).conj() @ b.to(torch.complex64)]
    return found, must_move

def distance(one, other):
    one, other = one.cdouble(), other.cdouble()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1.0)) if one.numel() else 0.0

stock, must_move = values()
runs = [stock]
for pieces in (2, 3, 1):
    noise_runs.split_products(pieces)
    ours, _ = values()
    far = [distance(one, other) > (1e-2 if one.dtype == torch.bfloat16 else 1e-5) for one, other in zip(stock, ours)]
    assert not any(far), (pieces, far)
    assert [(one.shape, one.dtype) for one in stock] == [(one.shape, one.dtype) for one in ours]
    if pieces > 1:
        for run in runs:
            moved = [not torch.equal(one, other) for one, other in zip(run, ours)]
            assert all(moved[:must_move]), (pieces, moved)
    runs.append(ours)
"""


def test_sums_are_near_and_not_the_same(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*preloaded(), str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
