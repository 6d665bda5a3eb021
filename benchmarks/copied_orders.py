"""The table for benchmarks of snapshots, and a target that discards the rows of a COPY."""

from __future__ import annotations

ORDERS = """
create table {name} as
select i as id, mod(i, 20000) as customer_id,
       (array['new', 'paid', 'packed'])[1 + mod(i, 3)] as status,
       (mod(i, 100000) / 100.0)::numeric(12,2) as amount, array['web', md5(i::text)] as tags,
       jsonb_build_object('sku', mod(i, 5000), 'coupon', 'SAVE' || mod(i, 90)) as details,
       case when mod(i, 3) > 0 then 'left at the door of house ' || i end as note,
       mod(i, 7) = 0 as gift,
       timestamp '2024-01-01' + i * interval '1 second' as ordered_at, now() as updated_at
  from generate_series(1, {rows}) i
"""


class Discarded:
    """Target of the driver's COPY that counts rows."""

    def __init__(self) -> None:
        self.rows = 0

    def write(self, row: bytes) -> None:
        """Count one row."""
        self.rows += 1
