"""Checks of the records of both arms, and averages over ranks by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from tests.plugins.ddp.arms import Cases, all_both
from tests.support.equality import compare
from tests.support.rarely import ALL_CASES

MANY = 6


def check(
    results: list[dict[str, Any]],
    *,
    backwards: int | None = None,
    stock_models: int = 0,
    bitwise: bool = True,
) -> None:
    """Demand the bits of stock PyTorch on two ranks, and also on more ranks if both arms round in the same way.

    They do not if ``p.grad`` is a view of its bucket (``gradient_as_bucket_view``). The stock reducer then divides by
    3. Otherwise it multiplies by 1/3, and the patched reducer always does.

    Args:
        results: The results of :func:`tests.plugins.ddp.arms.both`, by rank.
        backwards: The number of backwards that the patched reducer reduced. Default: at least one, unless a model fell
            back.
        stock_models: The number of models that fell back to the stock reducer.
        bitwise: Demand the bits on more than two ranks as well.
    """
    for result in results:
        compared = compare(result["stock"], result["patched"])
        if bitwise or len(results) <= 2:
            compared.assert_bitwise()
        else:
            compared.assert_equal()
        counters = result["counters"]
        assert counters["stock_models"] == stock_models
        assert counters["models"] > 0
        assert (counters["collectives"] > 0) == (counters["backwards"] > 0)
        if backwards is None:
            assert counters["backwards"] > 0 or stock_models
        else:
            assert counters["backwards"] == backwards


def same_bits(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Demand the bits of stock PyTorch on two ranks, or its values on more, in results of ``both``; return them."""
    for result in results:
        compared = compare(result["stock"], result["patched"], reordered=result.get("reordered"))
        (compared.assert_bitwise if len(results) <= 2 else compared.assert_equal)()
    return results


def check_all(
    results: list[dict[str, dict[str, Any]]], *, check: Callable[..., None] = check, **demands: Any
) -> None:
    """Check every case, by default by :func:`check`, and name those that fail."""
    failures = []
    for name in results[0]:
        try:
            check([result[name] for result in results], **demands)
        except AssertionError as error:
            failures.append(f"case {name}: {error}")
    assert not failures, "\n\n".join(failures)


def some(cases: Cases, first: int = 0) -> Cases:
    """Return every third case, for variants of a table that another test runs entirely; with ALL_CASES=1, all cases.

    Args:
        cases: All cases.
        first: The number of the first case, 0, 1 or 2. Three variants together then run all cases.
    """
    return cases if ALL_CASES else dict(list(cases.items())[first::3])


def on(world: int, cases: Cases) -> Cases:
    """Return the cases to run on ``world`` ranks: all cases on two ranks, and some cases of a large table on more."""
    return cases if world == 2 or len(cases) < MANY else some(cases)


def check_cases(
    run: Callable[..., Any],
    loop: Callable[..., Any],
    cases: Cases,
    *,
    options: dict[str, Any] | None = None,
    timeout: float = 120,
    **demands: Any,
) -> list[dict[str, Any]]:
    """Run cases (:func:`on`) in one call of ``run``, which is ``ranks(world)``, and check each; return the results."""
    results: list[dict[str, Any]] = run(
        all_both, loop, on(run.world, cases), options=options, timeout=timeout
    )
    check_all(results, **demands)
    return results


def average_by_hand(module: nn.Module) -> None:
    """Average every gradient over the ranks. All ranks must have gradients for the same parameters."""
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
