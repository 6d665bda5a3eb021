//! Reads a slot through pg_walstream to an LSN, and writes each row change as a line of JSON.

use pg_walstream::{
    CancellationToken, EventType, LogicalReplicationStream, ReplicationError,
    ReplicationStreamConfig, RetryConfig, StreamingMode,
};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::time::Duration;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, url, slot, publication, end, path] = arguments.as_slice() else {
        return Err("usage: URL SLOT PUBLICATION END_LSN FILE".into());
    };
    let end: u64 = end.parse()?;
    let config = ReplicationStreamConfig::new(
        slot.clone(),
        publication.clone(),
        1,
        StreamingMode::Off,
        Duration::from_secs(10),
        Duration::from_secs(30),
        Duration::from_secs(60),
        RetryConfig::default(),
    )
    .with_stop_at_lsn(end);
    let mut stream = LogicalReplicationStream::new(url, config).await?;
    stream.start(None).await?;
    let cancelled = CancellationToken::new();
    let file = File::create(path)?;
    let mut lines = BufWriter::with_capacity(1 << 20, file);
    let mut rows = 0u64;
    loop {
        match stream.next_event(&cancelled).await {
            Ok(event) => {
                if matches!(
                    event.event_type,
                    EventType::Insert { .. } | EventType::Update { .. } | EventType::Delete { .. }
                ) {
                    serde_json::to_writer(&mut lines, &event)?;
                    lines.write_all(b"\n")?;
                    rows += 1;
                }
            }
            Err(ReplicationError::StreamStopped(_)) => break,
            Err(error) => return Err(error.into()),
        }
    }
    lines.flush()?;
    lines.get_ref().sync_all()?;
    println!("{rows}");
    Ok(())
}
