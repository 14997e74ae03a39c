"""Which plan a softmax over planes, or its gradient, gets: of tiles of positions, of planes, or of bundles of columns.

Each family of plans says by itself whether it is faster than the plan so far, so their order counts.
"""

from __future__ import annotations

from .bundled_columns import faster_as_bundled
from .overlapping_tiles import overlapping_config
from .planes import faster_as_planes
from .skewed_tiles import faster_as_skewed
from .spatial import bundled_plan, plan_spatial, staggered, tiles_plan
from .types import Device, Plan, SpatialProblem


def tiles_of_positions(problem: SpatialProblem, device: Device) -> Plan:
    """The plan in tiles of positions."""
    config = overlapping_config(problem, device)
    if config is None:
        return plan_spatial(problem, device)
    return staggered(tiles_plan(problem, device, config), problem, device)


def plan_spatial_softmax(problem: SpatialProblem, device: Device) -> Plan:
    """The plan of softmax, log_softmax or the gradient of one of them.

    >>> problem = SpatialProblem(900, 77, "bfloat16", "bfloat16", vec=1, whole_sectors=False, in_phase=True)
    >>> plan_spatial_softmax(problem, DEVICES["sm_90"]).regime
    'spatial'
    """
    tiles = tiles_of_positions(problem, device)
    plan = faster_as_planes(problem, device, tiles) or tiles
    skewed = faster_as_skewed(problem, device, plan)
    plan = plan if skewed is None else tiles_plan(problem, device, skewed)
    bundle = faster_as_bundled(problem, plan)
    return plan if bundle is None else bundled_plan(problem, device, bundle)
