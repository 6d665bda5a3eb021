"""The kinds of SCD table: one file each, class and SQL together."""
