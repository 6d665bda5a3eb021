"""The theory of a merge: how raw changes become the rows of an SCD table.

Every function here takes DataFrames and returns DataFrames. None reads a file, and none writes a
table.

The input are the changes of one table in a range of the stream, each with its position
(commit LSN, ordinal), its operation, and the texts of its tuples. The output are rows with typed
columns that `kinds/` writes in one commit.

    raw changes                                            rows of the table
    (I, U, D, T; texts)                                    (typed, under the same keys)
          |                                                      |
          |  events: one row of the stream becomes               |
          v  contents and departures of keys                     |
    +-----------------------------------------+                  |
    | key 7   content    departure   content  |                  |
    | key 8              content              |                  |
    +-----------------------------------------+                  |
          |                                                      |
          |  toast: fill in the values that an update            |
          v  left out, from earlier changes ...  <---------------+  ... or from the table
    +-----------------------------------------+
    | the same events, every value known      |
    +-----------------------------------------+
          |
          +--> latest: the newest event of each key                  --> current image
          |
          +--> versions: each content opens a version, and           --> history,
          |    the next event of its key ends it                         soft deletes
          |
          +--> contents and departures counted as in a multiset      --> tables without a key

An example: a row is inserted with key 7, updated, and moved to key 8 by an update of its key.

    position   change                  events
    (10, 0)    I  7, 'a'               content of 7: 'a'
    (20, 0)    U  7, 'b'               content of 7: 'b'
    (30, 0)    U  7 -> 8, unchanged    departure of 7; content of 8: value unknown

`toast` finds that the row which left key 7 at (30, 0) last held 'b'. So the current image is the
row 8, 'b', and the history is

    key   value   from        to
    7     'a'     (10, 0)     (20, 0)
    7     'b'     (20, 0)     (30, 0)
    8     'b'     (30, 0)     current

The rules:

1. The order is (commit LSN, ordinal). No clock decides anything.
2. A key is compared by its typed value. If the type cannot hold a text, the text is compared too.
   At each commit a key has at most one row. Within a transaction it may have two (`latest`).
3. A tuple is read by the layout of its own relation version (`table_schema`), and columns are
   matched by attribute number. `typed_columns` casts the texts last.
4. A value that its typed column cannot hold is NULL there, and its text is in `_rescued`.
5. A TRUNCATE ends all rows that came before it (`truncates`).
6. `key_range` finds literals for the ON clause of a MERGE, so that Delta reads only the files that
   may have a key of the changes.
"""
