"""Reading of whole tables: COPY, ranges of pages, and digests of rows."""
