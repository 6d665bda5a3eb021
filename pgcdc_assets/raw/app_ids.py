"""The application ids of `raw/changes` by epoch. Existing lakes have them."""

from __future__ import annotations


def landing_app_id(capture: str, epoch: int) -> str:
    """Return the application id whose transaction version is the end of the newest window."""
    return f"pgcdc:{capture}:{epoch}"


def floor_app_id(capture: str, epoch: int) -> str:
    """Return the application id whose transaction version is the lowest retained LSN."""
    return f"{landing_app_id(capture, epoch)}:floor"
