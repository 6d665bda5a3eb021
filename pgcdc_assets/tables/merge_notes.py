"""Notes of an unfinished merge in a table's properties: what the rows do not follow yet.

A merge changes the columns of a table, and the properties that describe them, in commits before
that of the rows. A merge that ends in between leaves the new description over the old rows. Each
note says what the next merge needs to know of the old description. A note is never removed: it
holds for one table, from the fence at which it was written to the last fence before the rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pgcdc_assets.tables.properties import KEY, RELATION_ID, RELATION_VERSION

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from pgcdc_assets.tables.state import ScdState

# Columns that a merge has added, and whose default the rows may lack.
FILL = "pgcdc.fill"

# The relation that the rows follow.
FOLLOWED = "pgcdc.followed"

NOTES = (FILL, FOLLOWED)

# The last fence at which a note holds is at most the next one of its table. A write so many fences
# ahead is therefore past every note.
PAST_NOTES = 2


class FollowedRelation(NamedTuple):
    """A relation as rows follow it: its OID, its version, and its key as `key_text` writes it."""

    relation_id: int
    relation_version: int
    key: str | None


def write_note(state: ScdState, through: int, values: Mapping[str, Any]) -> str:
    """Return a note as the text of a property.

    Args:
        state: before the merge writes the property.
        through: the last fence at which the note holds.
        values: the content of the note.
    """
    table = state.table.metadata().id
    return json.dumps({"table": table, "fence": state.fence, "through": through, **values})


def read_note(state: ScdState, name: str) -> dict[str, Any] | None:
    """Read a note; None without a note that holds for this state of the table."""
    return _find_note(state.table, state.properties, state.fence, name)


def is_unfinished(table: DeltaTable, fence: int) -> bool:
    """Return whether a note holds for a version of a table, so its rows are still to follow.

    Args:
        table: the table at the version.
        fence: of the version.
    """
    properties = table.metadata().configuration
    return any(_find_note(table, properties, fence, name) is not None for name in NOTES)


def _find_note(
    table: DeltaTable, properties: Mapping[str, str], fence: int, name: str
) -> dict[str, Any] | None:
    text = properties.get(name)
    if text is None:
        return None
    noted: dict[str, Any] = json.loads(text)
    # A note of an earlier release names no table, and may be from the table that was copied.
    if not noted["fence"] <= fence <= noted.get("through", noted["fence"]):
        return None
    return noted if noted.get("table") == table.metadata().id else None


def last_fence_of_notes(table: DeltaTable) -> int:
    """Return the last fence at which a note of a table may hold; 0 without a note."""
    properties = table.metadata().configuration
    notes = [json.loads(properties[name]) for name in NOTES if name in properties]
    return max((noted.get("through", noted["fence"]) for noted in notes), default=0)


def followed_relation(state: ScdState) -> FollowedRelation | None:
    """Return what the rows of a table follow.

    Return None if the table does not say, because another program has made it.
    """
    noted = read_note(state, FOLLOWED)
    if noted is not None:
        return FollowedRelation(*(noted[name] for name in FollowedRelation._fields))
    properties = state.properties
    if RELATION_ID not in properties:
        return None
    relation_id, version = int(properties[RELATION_ID]), int(properties[RELATION_VERSION])
    return FollowedRelation(relation_id, version, properties.get(KEY))
