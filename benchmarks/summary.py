"""The entries in the tables of the README, with their descriptions.

A test fails if an unfavourable ratio is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# By heading: the name of an entry, the description of its measured value, and of the other side.
SUMMARY: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "Capture": (
        (
            "capture_vs_pg_recvlogical",
            "capture to the durable commit, loopback TCP",
            "`pg_recvlogical` to a file",
        ),
        (
            "capture_vs_pg_recvlogical_unix_socket",
            "the same over a Unix socket",
            "`pg_recvlogical` to a file",
        ),
        ("capture_tls_vs_pg_recvlogical", "the same over TLS", "`pg_recvlogical` to a file"),
        ("capture_tls_vs_tcp", "the same over TLS", "the same over TCP"),
        (
            "capture_cpu_vs_pg_recvlogical",
            "CPU of the same over TCP",
            "`pg_recvlogical` to a file",
        ),
        ("capture_cpu_tls_vs_tcp", "CPU of the same over TLS", "over TCP"),
        (
            "unix_socket_stream_alone_vs_walsender",
            "reading a stream over a Unix socket, without landing",
            "the server's time",
        ),
        ("capture_peak_memory", "peak memory of capture", "limit"),
        (
            "capture_beside_open_transaction",
            "windows of one stream beside an open transaction",
            "without the transaction",
        ),
        (
            "capture_beside_open_transaction_single_windows",
            "the same with a stream for each window",
            "without the transaction",
        ),
    ),
    "Capture beside other tools": (
        (
            "peers_pg_walstream",
            "capture to the durable commit, Postgres 15, TCP",
            "pg_walstream, JSON in a file",
        ),
        ("peers_pydbzengine", "the same", "pydbzengine (Debezium), JSON in a file"),
        ("peers_pydbzengine_iceberg", "the same", "pydbzengine (Debezium) to Iceberg"),
        ("peers_meltanolabs_tap_postgres", "the same", "Meltano's tap, JSON in a file"),
        ("peers_pipelinewise_tap_postgres", "the same", "PipelineWise's tap, JSON in a file"),
        ("peers_pg_walstream_peak_memory", "peak memory of the same", "pg_walstream"),
        ("peers_pydbzengine_iceberg_peak_memory", "the same", "pydbzengine (Debezium) to Iceberg"),
        ("peers_meltanolabs_tap_postgres_peak_memory", "the same", "Meltano's tap"),
        ("peers_pipelinewise_tap_postgres_peak_memory", "the same", "PipelineWise's tap"),
    ),
    "Copy of tables": (
        ("table_copy_vs_adbc", "copy of a table to text batches", "the same batches by ADBC"),
        ("table_copy_vs_adbc_typed", "the same", "ADBC with the source's types"),
        ("table_copy_landed_vs_copy_to_nothing", "copy of a table, landed", "COPY into nothing"),
        (
            "table_copy_4_connections_vs_copy_to_nothing",
            "copy of a large table over 4 connections, landed",
            "COPY into nothing over 4 connections",
        ),
        (
            "hundred_tables_copy_4_connections_vs_copy_to_nothing",
            "copy of a hundred small tables over 4 connections, landed",
            "COPY into nothing over 4 connections",
        ),
    ),
    "Merge": (
        (
            "merge_scd1_vs_plain_write",
            "merge of 750,000 changes into a new SCD1 table",
            "plain Spark write of the same rows",
        ),
        (
            "merge_scd1_second_window_vs_plain_write",
            "merge of the second half of them",
            "plain Spark write of the same rows",
        ),
        (
            "merge_arrays_typed_vs_text",
            "merge of text[] as ARRAY",
            "the same merge with the array as text",
        ),
        (
            "merge_1m_local_into_10m_vs_recipe",
            "a million recent changes into 10 million rows",
            "a MERGE written by hand",
        ),
        (
            "merge_1m_local_into_10m_vs_recipe_with_deletion_vectors",
            "the same",
            "a MERGE written by hand, with deletion vectors",
        ),
        (
            "merge_1m_spread_into_10m_vs_recipe",
            "a million changes spread over 10 million rows",
            "a MERGE written by hand",
        ),
        (
            "merge_1m_spread_into_10m_vs_recipe_with_deletion_vectors",
            "the same",
            "a MERGE written by hand, with deletion vectors",
        ),
        (
            "merge_10k_into_1m_vs_recipe",
            "10,000 recent changes into 1 million rows",
            "a MERGE written by hand",
        ),
        (
            "merge_10k_into_30m_vs_1m",
            "10,000 recent changes into 30 million rows",
            "into 1 million",
        ),
        (
            "merge_100k_into_1m_on_a_cluster_vs_recipe",
            "100,000 changes into a million rows on a cluster",
            "a MERGE written by hand",
        ),
        (
            "merge_100k_into_1m_on_a_cluster_connect_vs_recipe",
            "the same with the driver in a Spark server",
            "a MERGE written by hand",
        ),
        (
            "merge_scd2_vs_scd1_1m_into_10m",
            "a million changes into SCD2, 10 million rows",
            "into SCD1",
        ),
    ),
    "Many tables": (
        (
            "merge_100_tables_vs_recipe",
            "10 changes in each of 100 tables",
            "MERGEs written by hand",
        ),
        ("merge_5_of_500_tables", "10 changes in each of 5 of 500 tables", "limit"),
        (
            "materialisations_1_of_500_tables",
            "materialisations of a run of 500 tables, of which one changed",
            "limit",
        ),
        ("open_table_of_200000_log_entries", "open of a table with 200,000 log entries", "limit"),
    ),
    "Whole pipeline": (
        (
            "freshness_connect_p95",
            "commit to row in SCD1 at 1,000 changes a second, p95",
            "limit",
        ),
        ("freshness_100_tables_p95", "the same over a hundred tables", "limit"),
        ("sync_cold", "`pgcdc sync` of 800,000 changes, cold", ""),
        (
            "sync_small_server_vs_embedded",
            "`pgcdc sync` of ten changes with a Spark server",
            "without a server",
        ),
        ("first_merge_8_tables_cold", "first merge of 8 tiny tables in a new process", ""),
        ("dagster_run_overhead", "a run of Dagster, without its merge", "limit"),
        ("demo_cold", "`make demo` from an installed clone", "limit"),
    ),
    "Comparison with the source, and disk space": (
        (
            "verify_memory_growth",
            "peak memory of `pgcdc verify`, 2,000,000 rows",
            "200,000 rows",
        ),
        ("disk_to_live_bytes_at_most", "disk of small tables, to their live bytes", "limit"),
    ),
}
