"""The logical messages of a one-shot run, which are appended after its last merge."""

from __future__ import annotations

import dagster as dg

from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.project.code_location import LoadedCapture
from pgcdc_assets.orchestration.sensors.messages import WaitingMessages


def find_message_requests(
    instance: dg.DagsterInstance, repository: dg.RepositoryDefinition, loaded: LoadedCapture
) -> list[dg.RunRequest]:
    """Return the request for an append of landed messages, if the capture has their table."""
    if not loaded.capture.has_message_table:
        return []
    job = repository.get_job(Names.of(loaded.capture).messages_job)
    # The key may be that of a user's translator.
    (key,) = job.asset_layer.selected_asset_keys
    request = WaitingMessages(loaded.capture, key).find_request(instance, loaded.zone)
    return [request] if isinstance(request, dg.RunRequest) else []
