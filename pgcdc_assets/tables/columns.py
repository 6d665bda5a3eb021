"""The system columns of SCD tables, and names that Delta cannot distinguish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pgcdc_assets.errors import MergeConflict
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.settings import CdcTable

# The names of the columns that merges add: contracts with the readers of tables. The comments below
# are contracts too: a column with another comment counts as commented by the table's owner.
LSN = "_lsn"
ORDINAL = "_ordinal"
COMMIT_TS = "_commit_ts"
RESCUED = "_rescued"
DELETED = "_deleted"
DELETED_AT_LSN = "_deleted_at_lsn"
OP = "_op"
VALID_FROM = "_valid_from"
VALID_TO = "_valid_to"
IS_CURRENT = "_is_current"
VALID_FROM_LSN = "_valid_from_lsn"
VALID_TO_LSN = "_valid_to_lsn"
VALID_FROM_EPOCH = "_valid_from_epoch"
VALID_TO_EPOCH = "_valid_to_epoch"

SystemColumns = tuple[tuple[str, str, str], ...]
_RESCUED = (RESCUED, "MAP<STRING, STRING>", "texts that their typed columns cannot hold")
UNKNOWN_TYPE = "(type no longer known)"

SCD1_COLUMNS: SystemColumns = (
    (LSN, "BIGINT", "commit_lsn of the change that this row is"),
    (ORDINAL, "BIGINT", "position of that change in its transaction; negative for a copied row"),
    (COMMIT_TS, "TIMESTAMP", "commit time of that change; NULL for a copied row"),
    _RESCUED,
)

SOFT_DELETE_COLUMNS: SystemColumns = (
    *SCD1_COLUMNS,
    (DELETED, "BOOLEAN", "the source deleted this row, which is kept as it last was"),
    (DELETED_AT_LSN, "BIGINT", "commit_lsn of the delete or truncate; NULL for a row in place"),
)

CHANGE_LOG_COLUMNS: SystemColumns = (
    *SCD1_COLUMNS,
    (OP, "STRING", "I insert, U update, D delete with the old row, T truncate, S copied row"),
)

SCD2_COLUMNS: SystemColumns = (
    (VALID_FROM, "TIMESTAMP", "commit time of the change that made this version"),
    (VALID_TO, "TIMESTAMP", "commit time of the change that ended it; NULL while current"),
    (IS_CURRENT, "BOOLEAN", "no change has ended this version"),
    (VALID_FROM_LSN, "BIGINT", "commit_lsn of the change that made this version"),
    (VALID_TO_LSN, "BIGINT", "commit_lsn of the change that ended it; NULL while current"),
    (VALID_FROM_EPOCH, "INT", "epoch of _valid_from_lsn"),
    (VALID_TO_EPOCH, "INT", "epoch of _valid_to_lsn; NULL while current"),
    (ORDINAL, "BIGINT", "position of the making change in its transaction; -1 for a copy"),
    (OP, "STRING", "I insert, U update, S copied row"),
    _RESCUED,
)

# The system columns of a history that earlier releases did not write.
EPOCH_COLUMNS = (VALID_FROM_EPOCH, VALID_TO_EPOCH)


def is_log(table: CdcTable, *, has_key: bool) -> bool:
    """Return whether the SCD1 table of a table is a log of changes.

    Args:
        has_key: a key identifies the rows.
    """
    return table.may_be_log and not has_key


def system_columns_of(table: CdcTable) -> Iterator[SystemColumns]:
    """Yield the columns that the SCD tables of a table have beside those of the source."""
    if 1 in table.scd:
        log = CHANGE_LOG_COLUMNS if table.without_key == "log" else SCD1_COLUMNS
        yield SOFT_DELETE_COLUMNS if table.soft_deletes else log
    if 2 in table.scd:
        yield SCD2_COLUMNS


def check_names(relation: Relation, system: SystemColumns = SCD1_COLUMNS) -> None:
    """Check that Delta can distinguish the column names; Delta ignores case.

    Raises:
        MergeConflict: two columns collide, or a column and a system column.
    """
    ours = {normalize_name(name) for name, _, _ in system}
    seen: dict[str, str] = {normalize_name(name): name for name, _, _ in system}
    for column in relation.columns:
        other = seen.setdefault(normalize_name(column.name), column.name)
        if other != column.name or normalize_name(column.name) in ours:
            raise MergeConflict(
                table=relation.qualified_name,
                reason=f'column "{column.name}" and column "{other}" have equal names or differ in '
                "case only, and Delta cannot distinguish them. Rename one, or leave it out of the "
                "publication.",
            )


def unused_names(count: int, taken: Iterable[str]) -> list[str]:
    """Return names for further columns that no column of a table has, in any case."""
    longest = max(map(len, taken), default=0)
    return [f"_{number}".ljust(longest + 1, "_") for number in range(count)]


def normalize_name(name: str) -> str:
    """Return a form that is equal for names that Delta cannot distinguish."""
    if name.isascii():
        return name.lower()
    # Java's equalsIgnoreCase: character by character, so that the length stays.
    return "".join(c.upper().lower() if len(c.upper()) == 1 else c.lower() for c in name)
