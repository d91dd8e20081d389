"""Uses of parameters that are kept in bf16: what autocast casts, what is cast once for several uses, what is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ovpatch.overlap import main_shards
from tests.plugins.ddp.arms import Record, data, device
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, on, params
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS
from tests.plugins.dist_optimizer.test_param_dtype import check_kept
from tests.plugins.dist_optimizer.under_autocast import OPTIONS, autocast


class Uses(nn.Module):
    """Two matrices, a bias and a kernel, in as many uses as there are methods."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.how, self.step = how, 0
        self.w, self.v = (nn.Parameter(0.4 * torch.randn(8, 8)) for _ in range(2))
        self.bias, self.kernel = nn.Parameter(torch.randn(8)), nn.Parameter(0.4 * torch.randn(8, 8, 3))
        self.memory = nn.MultiheadAttention(8, 2, batch_first=True) if how == "attention" else None
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) if how == "encoder" else None
        self.cell = nn.LSTM(8, 8, batch_first=True) if how == "recurrent" else None

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, f"_{self.how}")(x).float()

    def _once(self, x: Tensor) -> Tensor:
        with autocast():
            return F.linear(F.linear(x, self.w, self.bias).tanh(), self.v)

    def _twice(self, x: Tensor) -> Tensor:
        with autocast():
            return F.linear(F.linear(x, self.w, self.bias).tanh(), self.w, self.bias)

    def _twice_without_a_cache(self, x: Tensor) -> Tensor:
        with autocast(cache_enabled=False):
            return F.linear(F.linear(x, self.w, self.bias).tanh(), self.w, self.bias)

    def _in_two_contexts(self, x: Tensor) -> Tensor:
        return self._twice(self._twice(x).float())

    def _nested(self, x: Tensor) -> Tensor:
        with autocast():
            y = self._twice(x)
            with autocast(enabled=False):
                y = y.float().softmax(-1)
            return self._twice(y)

    def _first_without_gradients(self, x: Tensor) -> Tensor:
        with autocast():
            with torch.no_grad():
                y = F.linear(x, self.w)
            return F.linear(y, self.w) + F.linear(y, self.v)

    def _last_without_gradients(self, x: Tensor) -> Tensor:
        with autocast():
            y = F.linear(x, self.w)
            with torch.no_grad():
                scale = F.linear(x, self.w).std()
            return F.linear(y / scale, self.w)

    def _products(self, x: Tensor) -> Tensor:
        with autocast():
            y = x @ self.w + torch.mm(x[0], self.v) + x[0].mm(self.w) + torch.addmm(self.bias, x[0], self.v)
            y = torch.bmm(y, self.w.new_ones(1, 1, 1) * torch.eye(8, device=x.device).expand(len(y), 8, 8))
            return torch.matmul(y, self.v) + y.matmul(self.w) + torch.addmm(self.bias, y[0], mat2=self.v)

    def _convolved(self, x: Tensor) -> Tensor:
        with autocast():
            y = F.conv1d(x.transpose(1, 2), self.kernel, self.bias, padding=1)
            return torch.conv_transpose1d(y, self.kernel, padding=1) + F.conv1d(y, self.kernel, padding="same")

    def _checkpointed(self, x: Tensor, reentrant: bool = False) -> Tensor:
        with autocast():
            y = checkpoint(self._once, F.linear(x, self.w), use_reentrant=reentrant)
            return F.linear(y, self.w)

    def _checkpointed_reentrant(self, x: Tensor) -> Tensor:
        return self._checkpointed(x.requires_grad_(), reentrant=True)

    def _offloaded(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self._twice(x)

    def _counted(self, x: Tensor) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            y = self._twice(x)
        assert counter.get_total_flops() == 2 * 2 * x.numel() * 8
        return y

    def _penalised(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = self._once(x).float()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + grad

    def _called_functionally(self, x: Tensor) -> Tensor:
        if self.how == "called_functionally":
            halved = {name: p * 0.5 for name, p in self.named_parameters()}
            self.how = "once"
            y = torch.func.functional_call(self, halved, (x,))
            self.how = "called_functionally"
        return y

    def _mapped(self, x: Tensor) -> Tensor:
        return torch.vmap(self._once)(x)

    def _differentiated(self, x: Tensor) -> Tensor:
        return self._once(x) + torch.func.grad(lambda given: self._once(given).float().sum())(x).detach()

    def _half_fp32(self, x: Tensor) -> Tensor:
        return F.linear(self._once(x).float(), self.v)

    def _fp16(self, x: Tensor) -> Tensor:
        with torch.autocast(device().type, torch.float16):
            return F.linear(x, self.w) + F.linear(x, self.v)

    def _regularised(self, x: Tensor) -> Tensor:
        return self._once(x).float() + self.w.norm()

    def _regularised_in_between(self, x: Tensor) -> Tensor:
        with autocast():
            y = F.linear(x, self.w, self.bias).tanh()
            if self.step % 7 == 5:  # when it is kept in bf16 and used twice
                y = y + self.w.norm() + self.bias.sum().sin()
            self.step += 1
            return F.linear(y, self.w, self.bias)

    def _attention(self, x: Tensor) -> Tensor:
        assert self.memory is not None
        with autocast():
            return F.linear(self.memory(x, x, x, need_weights=False)[0], self.w)

    def _encoder(self, x: Tensor) -> Tensor:
        assert self.layer is not None
        with autocast():
            return F.linear(self.layer(x), self.w)

    def _recurrent(self, x: Tensor) -> Tensor:
        assert self.cell is not None
        with autocast():
            return F.linear(self.cell(x)[0], self.w)


HOWS = [name[1:] for name, value in vars(Uses).items() if name[0] == "_" != name[1] and callable(value)]
QUIET = [
    "once", "twice", "twice_without_a_cache", "in_two_contexts", "nested", "first_without_gradients", "products",
    "last_without_gradients", "convolved", "checkpointed", "checkpointed_reentrant", "offloaded", "counted",
    "penalised",
]  # fmt: skip
NEVER = ["fp16", "called_functionally"]
EVALUATED = ["once", "twice", "nested", "first_without_gradients", "products", "attention", "encoder", "half_fp32"]


def used(how: str, evaluate: bool = False, steps: int = 20) -> list[Record]:
    raw = Uses(how).to(device())
    model = ddp(raw, **({"static_graph": True} if "reentrant" in how else {"find_unused_parameters": True}))
    opt = OPTIMIZERS["adamw"](model.parameters())
    records, reads = [], main_shards.reads.total
    for step in range(steps):
        loss = model(data(step, 3, 5, 8)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        found = []
        if evaluate and step % 4 == 3:
            for without in (torch.no_grad, torch.inference_mode):
                with without():
                    found.append(raw.eval()(data(step, 3, 5, 8)).clone())
            raw.train()
        records.append({"loss": loss.detach(), "found": found})
    assert how not in QUIET or main_shards.reads.total == reads, how
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [*records, params(model), grads, {str(k): v for k, v in opt.state_dict()["state"].items()}]


@pytest.mark.parametrize("world", [2, 3])
def test_uses(ranks, world):
    steps = 20 if world == 2 else 8
    cases = on(world, {how: {"how": how, "steps": steps} for how in HOWS if how not in NEVER})
    check_all(ranks(world)(all_cases, used, cases, options=OPTIONS), check=check_kept)
    if world == 2:
        others = {how: {"how": how, "steps": 8} for how in NEVER}
        others |= {f"evaluated, {how}": {"how": how, "evaluate": True, "steps": 8} for how in EVALUATED}
        check_all(ranks(world)(all_cases, used, others, options=OPTIONS))
