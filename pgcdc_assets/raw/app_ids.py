"""The application ids of `raw/changes` by epoch. Existing lakes have them."""

from __future__ import annotations


def landing_app_id(capture: str, epoch: int) -> str:
    """Return the application id whose transaction version is the end of the newest window."""
    return f"pgcdc:{capture}:{epoch}"


def timeline_start_app_id(capture: str, epoch: int, timeline: int) -> str:
    """Return the application id whose transaction version is the LSN at which a timeline began."""
    return f"{landing_app_id(capture, epoch)}:timeline:{timeline}"


def relations_app_id(capture: str, epoch: int) -> str:
    """Return the application id whose transaction version is the number of relation versions."""
    return f"{landing_app_id(capture, epoch)}:relations"


def floor_app_id(capture: str, epoch: int) -> str:
    """Return the application id whose transaction version is the lowest retained LSN."""
    return f"{landing_app_id(capture, epoch)}:floor"
