"""`colibri trace`: what expert caches of several sizes would have done with a recorded run.

In: a file that --trace wrote.  Out: the hit rate of every policy, and of the optimum that knows the future, at every budget.
"""

from pathlib import Path
from typing import Any

import click

from ..errors import reports_errors
from ..options import Number, command, json_option
from ..text import readable_bytes, to_json

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of all experts' bytes


@command(name="trace")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--warm-up", type=Number(int, 0), default=0, show_default=True, metavar="N", help="Passes that fill the cache uncounted.")
@json_option
@click.pass_context
@reports_errors
def trace(ctx: click.Context, file: Path, warm_up: int, as_json: bool) -> None:
    """Replay FILE, written by --trace, on simulated expert caches, and show each policy's hit rate.

    The last column is Belady's optimum: what a cache that knew the future would reach.
    """
    from libcolibri.cache_simulator import OPTIMUM, simulate
    from libcolibri.eviction import POLICIES
    from libcolibri.expert_trace import read_trace

    recorded = read_trace(file)
    names = [*POLICIES, OPTIMUM]
    budgets = [int(share * recorded.total_bytes) for share in SHARES]
    runs = [[simulate(recorded, name, budget, warm_up_passes=warm_up) for name in names] for budget in budgets]
    if as_json:
        click.echo(to_json({"trace": str(file), "passes": len(recorded.passes), "runs": [_facts(run) for row in runs for run in row]}))
        return
    click.echo(f"{len(recorded.passes)} passes, {len(recorded.layers)} layers, {readable_bytes(recorded.total_bytes)} of experts")
    click.echo(f"{'expert cache':>20}  " + "  ".join(f"{name:>17}" for name in names))
    for share, row in zip(SHARES, runs, strict=True):
        size = f"{readable_bytes(row[0].budget_bytes)} ({share:.0%})"
        click.echo(f"{size:>20}  " + "  ".join(f"{run.hit_rate:>16.1%} " for run in row).rstrip())


def _facts(run: Any) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "budget_bytes": run.budget_bytes,
        "hits": run.hits,
        "misses": run.misses,
        "read_bytes": run.read_bytes,
        "hit_rate": run.hit_rate,
    }
