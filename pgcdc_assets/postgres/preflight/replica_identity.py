"""Pre-flight check of replica identities: whether UPDATE and DELETE of the application succeed.

The server refuses UPDATE and DELETE on a published table without a usable replica identity
(CheckCmdReplicaIdentity() in src/backend/executor/execReplication.c). For a partitioned table the
identity of the partition that holds the row counts, also with publish_via_partition_root. ALTER
TABLE ... REPLICA IDENTITY on the root does not change the partitions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pgcdc_assets.postgres.catalog.publication import Publication, read_publication
from pgcdc_assets.postgres.catalog.relations import PublishedTable, read_relations
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.protocol.relation import ReplicaIdentity
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Relation

# Each table with its direct and indirect partitions. The function pg_partition_tree() would wait
# for the locks of ALTER TABLE and VACUUM FULL.
_PARTITIONS = """
part(root, oid) as (
    select r, r from {roots}
    union select p.root, i.inhrelid
            from part p
            join pg_inherits i on i.inhparent = p.oid
            join pg_class l on l.oid = i.inhrelid and l.relispartition)
"""

# The relations that need an identity: the table, or the leaf partitions of a partitioned table. The
# server publishes no change of a foreign or unlogged one (is_publishable_class() in
# src/backend/catalog/pg_publication.c), and does not refuse it.
_HOLDERS = f"""
with recursive {_PARTITIONS.format(roots="unnest(%s::bigint[]::oid[]) r")}
select p.root::bigint, c.oid::bigint,
       exists (select from pg_index i
                where i.indrelid = c.oid and i.indisprimary and not i.indimmediate)
  from part p join pg_class c on c.oid = p.oid
 where c.relkind = 'r' and c.relpersistence = 'p'
 order by c.oid::regclass::text
"""

_GENERATED = """
select a.attrelid::bigint, array_agg(a.attname::text)
  from pg_attribute a
 where a.attrelid = any(%s::bigint[]::oid[]) and a.attgenerated <> ''
 group by a.attrelid
"""

# Columns that a row filter uses and the replica identity lacks. The catalog stores a row filter as
# an expression tree (pg_node_tree), in which `:varattno` is the column's attnum.
_BEYOND_IDENTITY = f"""
with recursive used as (
    select distinct r.prrelid as relation, a.attname as name
      from pg_publication p
      join pg_publication_rel r on r.prpubid = p.oid
     cross join regexp_matches(r.prqual::text, ':varattno (\\d+)', 'g') as numbers
      join pg_attribute a on a.attrelid = r.prrelid and a.attnum = numbers[1]::int
     where p.pubname = %s
), {_PARTITIONS.format(roots="(select relation from used) u(r)")}, leaves as (
    select relation, name, p.oid as leaf from used join part p on p.root = relation
)
select relation::bigint, array_agg(distinct l.name::text),
       array_agg(distinct l.leaf::regclass::text)
  from leaves l join pg_class c on c.oid = l.leaf
 where c.relkind = 'r' and c.relpersistence = 'p' and c.relreplident <> 'f' and not exists (
    select from pg_index i join pg_attribute k on k.attrelid = i.indrelid
     where i.indrelid = l.leaf and k.attname = l.name
       and k.attnum = any((i.indkey::int2[])[0:i.indnkeyatts - 1])
       and case c.relreplident when 'd' then i.indisprimary and i.indimmediate
                               when 'i' then i.indisreplident else false end)
 group by relation
"""

# The code of a finding about a replica identity.
_IDENTITY = "replica_identity"
_FAIL = "the application's UPDATE and DELETE on this table fail."
# A table may have thousands of partitions.
_MOST_NAMED = 5


class _Beyond(NamedTuple):
    columns: list[str]
    tables: list[str]


@dataclass(frozen=True)
class _Holder:
    """A table or a partition with all its columns.

    Attributes:
        relation: the table or partition.
        has_deferrable_key: the primary key is deferrable, and therefore no replica identity.
    """

    relation: Relation
    has_deferrable_key: bool

    @property
    def columns(self) -> frozenset[str]:
        """The columns of the replica identity."""
        return frozenset(column.name for column in self.relation.columns if column.is_key)

    @property
    def has_identity(self) -> bool:
        """Whether the server accepts UPDATE and DELETE.

        The full identity of a table without columns is empty.
        """
        return bool(self.columns) or self.relation.has_full_identity

    @property
    def sql_name(self) -> str:
        return quoted(self.relation.schema, self.relation.table)

    @property
    def lack(self) -> str:
        """The reason for the missing replica identity, as an object of "has"."""
        if self.relation.replica_identity is ReplicaIdentity.DEFAULT and self.has_deferrable_key:
            return "a deferrable primary key, which is no replica identity"
        return {
            ReplicaIdentity.NOTHING: "replica identity NOTHING",
            ReplicaIdentity.INDEX: "a replica identity index that was dropped",
        }.get(self.relation.replica_identity, "no primary key")


@dataclass(frozen=True)
class Identity:
    """The replica identity of a published table.

    Attributes:
        holders: the table itself, or the leaf partitions of a partitioned table.
        generated: names of the generated columns.
        are_generated_exempt: the server accepts unpublished generated columns in the replica
            identity (before PG 18).
        filtered: columns of the row filter that are missing from the replica identity, and the
            tables that miss these columns; None without such columns.
    """

    holders: tuple[_Holder, ...]
    generated: frozenset[str]
    are_generated_exempt: bool
    filtered: _Beyond | None


def read_identities(
    conn: Connection, publication: Publication, relation_ids: Sequence[int]
) -> dict[int, Identity]:
    """Return the replica identities of published tables, by OID."""
    with conn.cursor() as cursor:
        cursor.execute(_HOLDERS, (list(relation_ids),))
        rows: list[tuple[int, int, bool]] = cursor.fetchall()
        cursor.execute(_GENERATED, (list(relation_ids),))
        generated = {relation_id: frozenset(names) for relation_id, names in cursor}
    relations = read_relations(conn, (holder for _, holder, _ in rows))
    holders: dict[int, list[_Holder]] = {}
    for relation_id, holder, is_deferrable in rows:
        if holder in relations:
            found = _Holder(relations[holder], is_deferrable)
            holders.setdefault(relation_id, []).append(found)
    filtered = _read_filtered(conn, publication)
    return {
        relation_id: Identity(
            tuple(holders.get(relation_id, ())),
            generated.get(relation_id, frozenset()),
            conn.server_version < 180000,
            filtered.get(relation_id),
        )
        for relation_id in relation_ids
    }


def are_identities_usable(
    conn: Connection, publication: str, tables: Sequence[PublishedTable]
) -> dict[int, bool]:
    """Return by OID whether updates and deletes of a table are accepted and identify their row.

    Of a partitioned table, the identity of each partition counts.
    """
    published = read_publication(conn, publication)
    identities = read_identities(conn, published, [t.relation.relation_id for t in tables])
    return {
        table.relation.relation_id: not any(
            finding.code == _IDENTITY
            for finding in examine_identity(
                published, table, identities[table.relation.relation_id], has_declared_key=True
            )
        )
        for table in tables
    }


def examine_identity(
    publication: Publication, table: PublishedTable, identity: Identity, has_declared_key: bool
) -> Iterator[Finding]:
    """Yield findings about the replica identity, the row filter and the key of a table.

    Args:
        publication: the publication.
        table: the published table.
        identity: the table's replica identity.
        has_declared_key: the capture's settings declare a key for the table.
    """
    if publication.needs_identity:
        lacking = [holder for holder in identity.holders if not holder.has_identity]
        if lacking:
            yield _lacking(table, lacking)
            return
        yield from _check_partitions(table, identity)
        yield from _check_sent(publication, table.relation, identity)
    if identity.filtered is not None:
        yield _beyond(table.relation, identity.filtered)
    relation = table.relation
    is_refused = publication.needs_identity and not (
        identity.are_generated_exempt and identity.generated.issuperset(relation.unsent_identity)
    )
    # Otherwise another finding says that the server refuses the changes.
    if relation.unsent_identity and not is_refused:
        yield partial_identity(relation)
    if not (relation.row_key or has_declared_key):
        yield Finding(
            "key",
            "warning",
            f"Table {relation.qualified_name} has no key: the SCD1 table is a multiset of rows "
            "(`scd: [1]` only), and a merge of an update or a delete reads the whole table.",
            f"alter table {_sql_name(relation)} add primary key (COLUMN, ...); or declare `key` "
            "for the table in the settings; or, to keep changes instead of rows, set "
            "`without_key: log`.",
            relation.qualified_name,
        )


def _lacking(table: PublishedTable, lacking: Sequence[_Holder]) -> Finding:
    """Return the error for a table or partitions without a replica identity."""
    name = table.relation.qualified_name
    if not table.is_partitioned:
        (holder,) = lacking
        why, remedy = holder.lack, _remedy(holder, holder.sql_name)
    else:
        why = "; ".join(
            f"partition {holder.relation.qualified_name} with {holder.lack}"
            for holder in lacking[:_MOST_NAMED]
        )
        remedies = (_remedy(holder, _sql_name(table.relation)) for holder in lacking[:_MOST_NAMED])
        why, remedy = _and_more(why, lacking), _and_more("; ".join(remedies), lacking)
    return Finding(
        _IDENTITY,
        "error",
        f"Table {name} has {why}: with updates or deletes published, {_FAIL}",
        remedy,
        name,
    )


def _check_partitions(table: PublishedTable, identity: Identity) -> Iterator[Finding]:
    """Yield an error for partitions whose old rows lack the key of the table.

    The old rows have the columns of the partition's identity. The merge reads the root's key there,
    or the whole row if the root has no key and the identity FULL.
    """
    relation = table.relation
    if not table.is_partitioned:
        return
    needed = set(relation.row_key)
    if not relation.has_full_identity:
        needed |= {column.name for column in relation.columns if column.is_key}
    elif not relation.primary_key:
        needed = {column.name for column in relation.columns}
    unfit = [holder for holder in identity.holders if not needed <= holder.columns]
    if not unfit:
        return
    why = "; ".join(
        f"partition {holder.relation.qualified_name} without "
        f"{_listed(needed - holder.columns)} in its replica identity"
        for holder in unfit[:_MOST_NAMED]
    )
    remedy = "; ".join(
        f"alter table {holder.sql_name} replica identity "
        f"{'default' if needed <= set(holder.relation.primary_key) else 'full'}"
        for holder in unfit[:_MOST_NAMED]
    )
    yield Finding(
        _IDENTITY,
        "error",
        f"Table {relation.qualified_name} has {_and_more(why, unfit)}: updates and deletes of "
        "these partitions do not identify their row, and the lake keeps it.",
        _and_more(remedy, unfit),
        relation.qualified_name,
    )


def _check_sent(
    publication: Publication, relation: Relation, identity: Identity
) -> Iterator[Finding]:
    """Yield errors for the columns of the replica identity that are not published."""
    name = relation.qualified_name
    needed = frozenset[str]().union(*(holder.columns for holder in identity.holders))
    unsent = needed - {column.name for column in relation.columns}
    generated = unsent & identity.generated
    if unsent - generated:
        yield Finding(
            "column_list",
            "error",
            f"The column list of table {name} omits {_listed(unsent - generated)} of the table's "
            f"replica identity: {_FAIL}",
            f"Add these columns to the column list in publication {publication.name}, or remove "
            "the column list.",
            name,
        )
    if generated and not identity.are_generated_exempt:
        yield Finding(
            "generated_column",
            "error",
            f"Table {name} has generated columns in its replica identity that publication "
            f"{publication.name} does not send, {_listed(generated)}: {_FAIL}",
            f"alter publication {quoted(publication.name)} set (publish_generated_columns = "
            "stored); or add the columns to the table's column list; or, for virtual columns, "
            "choose a replica identity without these columns.",
            name,
        )


def partial_identity(relation: Relation) -> Finding:
    """Return the error for a table whose replica identity is not sent as a whole."""
    name, unsent = relation.qualified_name, relation.unsent_identity
    return Finding(
        _IDENTITY,
        "error",
        f"Table {name} has {_listed(unsent)} in its replica identity, and the publication does not "
        "send "
        f"{'these columns' if len(unsent) > 1 else 'this column'}: rows that differ in nothing "
        "else of the identity would count as one.",
        f"alter table {_sql_name(relation)} replica identity full; or publish the columns "
        "(generated columns: from Postgres 18 on).",
        name,
    )


def _beyond(relation: Relation, filtered: _Beyond) -> Finding:
    """Return the error for a row filter that uses columns outside the replica identity."""
    name = relation.qualified_name
    return Finding(
        "row_filter",
        "error",
        f"The row filter of table {name} uses {', '.join(filtered.columns)}, which the replica "
        f"identity of {', '.join(filtered.tables)} does not have: {_FAIL}",
        "; ".join(f"alter table {table} replica identity full" for table in filtered.tables)
        + "; or remove these columns from the row filter.",
        name,
    )


def _remedy(holder: _Holder, table: str) -> str:
    """Return the SQL that adds a replica identity.

    Args:
        holder: the table or partition without a replica identity.
        table: the quoted table that a primary key would be added to.
    """
    relation, name = holder.relation, holder.sql_name
    if relation.primary_key and relation.replica_identity is not ReplicaIdentity.DEFAULT:
        return f"alter table {name} replica identity default"
    full = f"alter table {name} replica identity full"
    if relation.primary_key:
        return full
    return f"alter table {table} add primary key (COLUMN, ...); or: {full}"


def _and_more(text: str, all_of_them: Sequence[_Holder]) -> str:
    more = len(all_of_them) - _MOST_NAMED
    return f"{text}; and likewise for {more} more partitions" if more > 0 else text


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def _sql_name(relation: Relation) -> str:
    return quoted(relation.schema, relation.table)


def _read_filtered(conn: Connection, publication: Publication) -> dict[int, _Beyond]:
    """Return the row filters' columns outside the replica identity, by published table's OID."""
    if conn.server_version < 150000 or not publication.needs_identity:
        return {}
    with conn.cursor() as cursor:
        cursor.execute(_BEYOND_IDENTITY, (publication.name,))
        return {row[0]: _Beyond(*row[1:]) for row in cursor}
