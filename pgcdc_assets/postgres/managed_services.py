"""Remedies for settings of the server, where a managed service does not allow ALTER SYSTEM."""

from __future__ import annotations

RDS = "rds_superuser"
AZURE = "azure_pg_admin"
CLOUD_SQL = "cloudsqlsuperuser"

# The administrator role of the managed service, which only this service has; NULL elsewhere.
MANAGED_BY_SQL = f"""
(select rolname::text from pg_roles where rolname in ('{RDS}', '{AZURE}', '{CLOUD_SQL}') limit 1)
"""

_PLACES = {
    RDS: "the parameter group (of the cluster on Aurora)",
    AZURE: "the server parameters",
    CLOUD_SQL: "the flags of the instance",
}

_WAL_LEVEL = {
    RDS: "Set rds.logical_replication = 1 in the parameter group (of the cluster on Aurora) and "
    "reboot the instance.",
    AZURE: "Set wal_level to LOGICAL in the server parameters and restart the server.",
    CLOUD_SQL: "Set the flag cloudsql.logical_decoding = on; the instance restarts.",
}


def setting_remedy(managed_by: str | None, setting: str, value: str) -> str:
    """Return the statement that changes a setting, or its place in a managed service.

    Args:
        managed_by: the administrator role of a managed service; None on other servers.
        setting: a setting that a reload of the configuration applies.
        value: the value as SQL, such as '1min' with its quotes.
    """
    place = _PLACES.get(managed_by or "")
    if place is None:
        return f"alter system set {setting} = {value}; select pg_reload_conf()"
    shown = value.strip("'")
    return f"Set {setting} to {shown} in {place}"


def wal_level_remedy(managed_by: str | None) -> str:
    """Return how to set wal_level to logical, which needs a restart of the server.

    Args:
        managed_by: the administrator role of a managed service; None on other servers.
    """
    default = "alter system set wal_level = logical; then restart the server."
    return _WAL_LEVEL.get(managed_by or "", default)
