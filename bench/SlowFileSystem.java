package bench;

import java.io.FilterOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.net.URI;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.util.Progressable;

/**
 * The local file system as slow as a store: a file costs its writer one PUT's time when it is closed, and nothing else
 * costs any. Every call counts as one request, where s3a makes one to eight of it: both are in stock Spark's favour.
 */
public final class SlowFileSystem extends RawLocalFileSystem {
  private static final AtomicLong REQUESTS = new AtomicLong();

  /** Return the number of calls so far. */
  public static long requests() {
    return REQUESTS.get();
  }

  @Override
  public URI getUri() {
    return URI.create("slow:///");
  }

  @Override
  public String getScheme() {
    return "slow";
  }

  @Override
  public FSDataInputStream open(Path path, int bufferSize) throws IOException {
    REQUESTS.incrementAndGet();
    return super.open(path, bufferSize);
  }

  @Override
  public FSDataOutputStream create(
      Path path,
      FsPermission permission,
      boolean overwrite,
      int bufferSize,
      short replication,
      long blockSize,
      Progressable progress)
      throws IOException {
    // Without Hadoop's native library a permission would cost a process, which is not one of a store's time.
    return create(path, overwrite, bufferSize, replication, blockSize, progress);
  }

  @Override
  public FSDataOutputStream create(
      Path path, boolean overwrite, int bufferSize, short replication, long blockSize, Progressable progress)
      throws IOException {
    REQUESTS.incrementAndGet();
    OutputStream file = super.create(path, overwrite, bufferSize, replication, blockSize, progress);
    return new FSDataOutputStream(new Slow(file), statistics);
  }

  @Override
  public boolean rename(Path source, Path target) throws IOException {
    REQUESTS.incrementAndGet();
    return super.rename(source, target);
  }

  @Override
  public boolean delete(Path path, boolean recursive) throws IOException {
    REQUESTS.incrementAndGet();
    return super.delete(path, recursive);
  }

  @Override
  public FileStatus[] listStatus(Path path) throws IOException {
    REQUESTS.incrementAndGet();
    return super.listStatus(path);
  }

  @Override
  public FileStatus getFileStatus(Path path) throws IOException {
    REQUESTS.incrementAndGet();
    return super.getFileStatus(path);
  }

  private final class Slow extends FilterOutputStream {
    private boolean closed;

    private Slow(OutputStream file) {
      super(file);
    }

    @Override
    public void write(byte[] bytes, int from, int count) throws IOException {
      out.write(bytes, from, count);
    }

    @Override
    public void close() throws IOException {
      if (!closed) {
        closed = true;
        super.close();
        try {
          Thread.sleep(getConf().getLong("fs.slow.put.ms", 50));
        } catch (InterruptedException error) {
          Thread.currentThread().interrupt();
          throw new IOException(error);
        }
      }
    }
  }
}
