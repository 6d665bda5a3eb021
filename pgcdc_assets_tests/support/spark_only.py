"""Features of Delta tables that delta-rs does not write."""

# The rest of an `ALTER TABLE` by name.
FEATURES = {
    "clustering": "CLUSTER BY (id)",
    "row tracking": "SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')",
    "in-commit timestamps": "SET TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true')",
}
