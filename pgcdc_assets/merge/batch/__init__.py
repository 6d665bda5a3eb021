"""Small current images and histories of a step, merged together in this process.

A MERGE by Spark costs its driver about half a second, however small the table is, because Delta
plans and runs several jobs. A publication with a hundred small tables needs one reading of the
changes, one cast of texts to types, and a small file and a commit for each table:

    raw/changes, one scan          current files of the table
          |                                  |
          v                                  |
    latest: the last change of each key,     |
    for a history all changes in order       |
          |                                  |
          v                                  |
    casts: ONE Spark projection              |
    for the texts of all tables              |
          |                                  v
          +----------> images: rows of a current image after the step
                       versions: of a history, the current versions, and those that end
                                 |
                                 v
                       commit: one file, or two of a history, one commit by delta-rs

`scope` decides which tables are merged so. Whatever is unusual about a table, its changes or its
rows, is left to Spark (`merge/kinds`), which gives the same rows. The rules of a fold are those of
`merge/fold`, and the only casts are the expressions of `merge/fold/types.py`
(docs/decisions/0064-small-tables-without-spark-jobs.md).
"""
