"""A worker for tests: counts steps in a file for each rank, and leaves after the ordered step."""

from __future__ import annotations

import json

from ovpatch.insight import steps
from ovpatch.session.worker_orders import Orders


def start_worker(orders: Orders) -> None:
    def at_border(number: int) -> None:
        (orders.directory / f"rank{steps.get_rank()}.json").write_text(json.dumps({"step": number}))
        if number == orders.details["steps"]:
            steps.exit_with_peers(orders.directory)

    steps.StepCounter(orders.directory, at_border).start_counting()
