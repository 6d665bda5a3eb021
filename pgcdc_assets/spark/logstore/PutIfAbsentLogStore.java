package pgcdc.logstore;

import io.delta.storage.CloseableIterator;
import io.delta.storage.HadoopFileSystemLogStore;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * A LogStore for S3 with any number of writers: a log entry is written by a conditional PUT
 * (If-None-Match), as delta-rs does. S3A of Hadoop 3.4.2 and later has conditional PUTs.
 */
public class PutIfAbsentLogStore extends HadoopFileSystemLogStore {
  private static final String CONDITION = "fs.option.create.conditional.overwrite";

  public PutIfAbsentLogStore(Configuration conf) {
    super(conf);
  }

  @Override
  public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration conf)
      throws IOException {
    FileSystem store = path.getFileSystem(conf);
    byte[] content = contentOf(actions);
    try {
      FSDataOutputStream out = overwrite ? store.create(path, true) : createIfAbsent(store, path);
      // Closing the stream sends the PUT: an exception before must not close the stream.
      out.write(content);
      out.close();
    } catch (IOException error) {
      if (overwrite) {
        throw error;
      }
      // The answer to a PUT may be lost, and its repetition then fails by the condition. Delta's
      // commits are unique, so equal content is this commit.
      byte[] found = find(store, path, error);
      if (!Arrays.equals(found, content)) {
        FileAlreadyExistsException exists = new FileAlreadyExistsException(path.toString());
        exists.initCause(error);
        throw exists;
      }
    }
  }

  /** A PUT is visible as a whole. */
  @Override
  public Boolean isPartialWriteVisible(Path path, Configuration conf) {
    return false;
  }

  @SuppressWarnings("unchecked")
  private static FSDataOutputStream createIfAbsent(FileSystem store, Path path)
      throws IOException {
    FSDataOutputStreamBuilder<FSDataOutputStream, ?> builder = store.createFile(path);
    builder.overwrite(false);
    builder.recursive();
    builder.must(CONDITION, true);
    return builder.build();
  }

  private static byte[] contentOf(Iterator<String> actions) throws IOException {
    ByteArrayOutputStream content = new ByteArrayOutputStream();
    try {
      while (actions.hasNext()) {
        content.write((actions.next() + "\n").getBytes(StandardCharsets.UTF_8));
      }
    } finally {
      if (actions instanceof CloseableIterator) {
        ((CloseableIterator<String>) actions).close();
      }
    }
    return content.toByteArray();
  }

  /** Return the stored entry, or throw the error of its write if there is none. */
  private static byte[] find(FileSystem store, Path path, IOException error) throws IOException {
    try (FSDataInputStream in = store.open(path)) {
      return in.readAllBytes();
    } catch (IOException unreadable) {
      error.addSuppressed(unreadable);
      throw error;
    }
  }
}
