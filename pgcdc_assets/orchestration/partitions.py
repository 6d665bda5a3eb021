"""Which partitions of the snapshot asset an SCD asset depends on."""

from __future__ import annotations

import dagster as dg


class SpecificPartitionsPartitionMapping(dg.SpecificPartitionsPartitionMapping):
    """Map every window of an SCD asset to its own table's partition of the snapshot asset.

    Dagster keeps one mapping for each asset and dependency, but refuses a step whose assets map one
    dependency differently. Mappings of this class are equal to each other, and pass that check.

    Dagster serializes an object by the name of its class. The name is therefore that of the base
    class: the web server and the daemon, which do not load this package, read the base class.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dg.SpecificPartitionsPartitionMapping)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(type(self).__name__)
