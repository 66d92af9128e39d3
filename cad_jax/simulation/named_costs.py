"""Cost models as people name them on a command line. Host only."""

from dataclasses import replace
from pathlib import Path

from cad_jax.sharding.cost import Device
from cad_jax.sharding.cost_model import (
    CostModel,
    Link,
    analytic,
    from_csv,
    shipped,
    shipped_profiles,
)

# By device; fast kernels leave less to hide behind. Others: analytic.
PROFILES = {"h100": "h200_fa3", "h200": "h200_fa3", "cpu": "cpu"}


def profile_file(profile: str | None) -> Path | None:
    """A file of one's own that a profile names; None for one that ships, and for "analytic"."""
    file = Path(profile or "")
    ships = profile in (None, "analytic", *shipped_profiles())
    return file if not ships and (file.suffix == ".csv" or file.is_file()) else None


def profile_path(profile: str, option: str) -> Path:
    """The file of a profile: one's own, or one that ships. option: that names it. Raises ValueError where it is neither."""
    return profile_file(profile) or shipped(profile, option)


def named_costs(
    device: Device,
    profile: str | None,
    between_nodes_gb_s: float | None = None,
    option: str = "--profile",
) -> CostModel:
    """A cost model as people name it.

    profile: a CSV, the name of one that ships, or "analytic"; None: what fits the device.
    between_nodes_gb_s: instead of the profile's or the device's. option: that gave the profile, as people wrote it.
    Raises ValueError for an unknown or unfit profile.
    """
    profile = profile or PROFILES.get(device.name, "analytic")
    if profile == "analytic":
        costs = analytic(device)
    else:
        try:
            costs = from_csv(profile_path(profile, option), device)
        except ValueError as error:
            if device.peak_flops is None:
                raise
            raise ValueError(
                f"{error}; or give {option} analytic, a fraction of the peak of {device.name}"
            ) from error
    if between_nodes_gb_s is None:
        return costs
    link = Link(1e9 * between_nodes_gb_s, costs.between_nodes.latency_s)
    return replace(costs, between_nodes=link)
