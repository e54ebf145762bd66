package dstl.fs;

import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.OutputStream;
import java.net.URI;
import java.nio.ByteBuffer;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSInputStream;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.util.Progressable;

/**
 * Keeps the checkpoint directories of streaming queries in DSTL's log: {@code dstl://bucket/path} lies in
 * {@code s3://bucket/path/_dstl}, {@code dstl:///path} in the directory {@code /path/_dstl}.
 *
 * <p>A file is whole or not there. A temporary file stays in this JVM until it is renamed, which is one message to the
 * service of this host. Files below {@code offsets/} and {@code commits/} are barriers: they, and everything that was
 * put before them, are durable when their rename returns. Directories need not be made.
 */
public final class DstlFileSystem extends FileSystem {
  /** The scheme of its URIs. */
  public static final String SCHEME = "dstl";

  /** As many bytes as a block of the log has at most: {@code dstl/files/file_parts.py}. */
  private static final int PART = 4 << 20;

  /** Hadoop splits work by blocks; the files of a checkpoint are smaller, and nothing splits them. */
  private static final long BLOCK = 64L << 20;

  private static final Map<String, Written> TEMPORARY = new ConcurrentHashMap<>();
  private static final Set<String> DIRECTORIES = ConcurrentHashMap.newKeySet();

  private URI uri;
  private Path workingDirectory;

  /** A file that is written and not put: its last bytes, what the service has of it under a token, and whose it is. */
  private record Written(String token, Connection lease, byte[] rest, long size, long attempt, long time) {
    /** Let go of the parts that the service holds, if any: the file has taken them, or will never be. */
    void release() {
      if (lease != null) {
        lease.close();
      }
    }
  }

  @Override
  public void initialize(URI name, Configuration configuration) throws IOException {
    Service.check(configuration);
    super.initialize(name, configuration);
    setConf(configuration);
    String authority = name.getAuthority();
    uri = URI.create(SCHEME + "://" + (authority == null ? "/" : authority));
    workingDirectory = new Path(uri.toString() + (authority == null ? "" : "/"));
  }

  @Override
  public String getScheme() {
    return SCHEME;
  }

  @Override
  public URI getUri() {
    return uri;
  }

  @Override
  public Path getWorkingDirectory() {
    return workingDirectory;
  }

  @Override
  public void setWorkingDirectory(Path path) {
    workingDirectory = makeQualified(path);
  }

  @Override
  public FSDataInputStream open(Path path, int bufferSize) throws IOException {
    FileStatus status = getFileStatus(path);
    if (status.isDirectory()) {
      throw new FileNotFoundException(path + " is a directory");
    }
    Written written = TEMPORARY.get(key(path));
    byte[] whole = written != null && written.token().isEmpty() ? written.rest() : null;
    return new FSDataInputStream(new Content(key(path), status.getLen(), whole));
  }

  @Override
  public FSDataOutputStream create(
      Path path, FsPermission permission, boolean overwrite, int size, short copies, long block, Progressable progress)
      throws IOException {
    Path qualified = makeQualified(path);
    if (!TaskFile.isTemporary(path.getName())) {
      FileStatus found = find(path);
      if (found != null && found.isDirectory()) {
        throw new FileAlreadyExistsException(path + " is a directory");
      }
      if (found != null && !overwrite) {
        throw new FileAlreadyExistsException(path + " is there already");
      }
    }
    return new FSDataOutputStream(new Writer(qualified, overwrite), statistics);
  }

  @Override
  public FSDataOutputStream append(Path path, int bufferSize, Progressable progress) {
    throw new UnsupportedOperationException("files of dstl:// are written once: nothing is appended to " + path);
  }

  @Override
  public boolean rename(Path source, Path target) throws IOException {
    boolean isTemporary = TEMPORARY.containsKey(key(source));
    if (!isTemporary && find(source) == null) {
      return false;
    }
    FileStatus found = find(target);
    Path to = found != null && found.isDirectory() ? new Path(target, source.getName()) : target;
    try {
      // Spark has looked whether it may, and asks for no more here; a barrier is never replaced.
      move(source, to, isTemporary);
      return true;
    } catch (FileAlreadyExistsException error) {
      return false;
    }
  }

  /** Rename a file; it takes another's place only where it may. */
  void move(Path source, Path target, boolean overwrite) throws IOException {
    // Spark asks for a temporary file once: what is not renamed then is given up, and forgotten by nobody else.
    Written written = TEMPORARY.remove(key(source));
    if (written == null) {
      copy(source, target, overwrite);
      delete(source, false);
      return;
    }
    CommittedBatch.complete(makeQualified(target));
    put(makeQualified(target), written, overwrite);
  }

  @Override
  public boolean delete(Path path, boolean recursive) throws IOException {
    Written written = TEMPORARY.remove(key(path));
    if (written != null) {
      written.release();
      return true;
    }
    if (TaskFile.isTemporary(path.getName())) {
      return false;
    }
    FileStatus found = path.isRoot() ? null : find(path);
    if (found == null) {
      return false;
    }
    String prefix = key(path);
    if (found.isDirectory()) {
      if (!recursive && listStatus(path).length > 0) {
        throw new IOException(path + " is a directory that is not empty");
      }
      DIRECTORIES.removeIf(each -> each.equals(prefix) || each.startsWith(prefix + "/"));
    }
    Service.call("delete_file", Map.of("path", prefix, "run", TaskFile.writer(getConf())));
    return true;
  }

  @Override
  public FileStatus[] listStatus(Path path) throws IOException {
    Connection.Reply reply = Service.call("list_files", Map.of("path", key(path), "run", run()));
    Map<String, FileStatus> found = new LinkedHashMap<>();
    for (Object each : reply.list("entries")) {
      List<?> entry = (List<?>) each;
      Path child = new Path(makeQualified(path), (String) entry.get(0));
      long size = ((Number) entry.get(1)).longValue();
      found.put(child.getName(), status(child, size, ((Number) entry.get(2)).longValue()));
    }
    if (reply.flag("is_file")) {
      return new FileStatus[] {getFileStatus(path)};
    }
    String prefix = key(path) + "/";
    for (String each : DIRECTORIES) {
      if (each.startsWith(prefix)) {
        String name = each.substring(prefix.length()).split("/", 2)[0];
        found.putIfAbsent(name, status(new Path(makeQualified(path), name), -1, 0));
      }
    }
    if (found.isEmpty() && !DIRECTORIES.contains(key(path))) {
      throw new FileNotFoundException(path + " is not there");
    }
    return found.values().toArray(new FileStatus[0]);
  }

  @Override
  public boolean mkdirs(Path path, FsPermission permission) throws IOException {
    FileStatus found = find(path);
    if (found != null && found.isFile()) {
      throw new FileAlreadyExistsException(path + " is a file");
    }
    DIRECTORIES.add(key(path));
    return true;
  }

  @Override
  public FileStatus getFileStatus(Path path) throws IOException {
    FileStatus found = find(path);
    if (found == null) {
      throw new FileNotFoundException(path + " is not there");
    }
    return found;
  }

  private FileStatus find(Path path) throws IOException {
    Path qualified = makeQualified(path);
    Written written = TEMPORARY.get(key(path));
    if (written != null) {
      return status(qualified, written.size(), written.time());
    }
    if (TaskFile.isTemporary(path.getName())) {
      return null;
    }
    Connection.Reply reply = Service.call("stat_file", Map.of("path", key(path), "run", run()));
    if (reply.number("size") >= 0) {
      return status(qualified, reply.number("size"), reply.number("modified_ms"));
    }
    if (reply.flag("is_directory") || path.isRoot() || isMade(key(path))) {
      return status(qualified, -1, reply.number("modified_ms"));
    }
    return null;
  }

  private static boolean isMade(String path) {
    return DIRECTORIES.contains(path) || DIRECTORIES.stream().anyMatch(each -> each.startsWith(path + "/"));
  }

  private static FileStatus status(Path path, long size, long time) {
    return new FileStatus(Math.max(0, size), size < 0, 1, BLOCK, time, path);
  }

  private String run() {
    return TaskFile.run(getConf());
  }

  private String key(Path path) {
    return makeQualified(path).toString();
  }

  private void copy(Path source, Path target, boolean overwrite) throws IOException {
    if (getFileStatus(source).isDirectory()) {
      throw new IOException("directories of dstl:// are not renamed: " + source);
    }
    try (FSDataInputStream from = open(source, PART);
        FSDataOutputStream to = create(target, overwrite, PART)) {
      from.transferTo(to);
    }
  }

  private void put(Path target, Written written, boolean overwrite) throws IOException {
    try {
      Service.call(
          "put_file",
          Map.of(
              "path", target.toString(),
              "run", TaskFile.writer(target, getConf()),
              "attempt", written.attempt(),
              "overwrite", overwrite,
              "token", written.token(),
              "size", written.size()),
          ByteBuffer.wrap(written.rest()));
    } finally {
      written.release();
    }
    statistics.incrementWriteOps(1);
  }

  /** Takes a file's bytes; what is above a part goes to the service at once, so that the JVM holds no more. */
  private final class Writer extends OutputStream {
    private final Path path;
    private final boolean overwrite;
    private final long attempt;
    private final ByteArrayOutputStream part = new ByteArrayOutputStream();
    private String token = "";
    private Connection lease;
    private long size;
    private boolean closed;

    private Writer(Path path, boolean overwrite) {
      this.path = path;
      this.overwrite = overwrite;
      this.attempt = TaskFile.attemptOf(path.getParent().toString(), path.getName());
      // A checksum's thread, which has no task, asks when it puts the file.
      TaskFile.writer(getConf());
    }

    @Override
    public void write(int each) throws IOException {
      write(new byte[] {(byte) each}, 0, 1);
    }

    @Override
    public void write(byte[] bytes, int from, int count) throws IOException {
      if (closed) {
        throw new IOException(path + " was closed");
      }
      part.write(bytes, from, count);
      size += count;
      if (part.size() >= PART) {
        if (token.isEmpty()) {
          token = UUID.randomUUID().toString();
          lease = Service.lease(path.toString());
        }
        ByteBuffer content = ByteBuffer.wrap(part.toByteArray());
        part.reset();
        Service.stage(lease, token, content);
      }
    }

    @Override
    public void close() throws IOException {
      if (closed) {
        return;
      }
      closed = true;
      String name = path.getName();
      Written written = new Written(token, lease, part.toByteArray(), size, attempt, System.currentTimeMillis());
      if (TaskFile.isTemporary(name)) {
        TEMPORARY.put(path.toString(), written);
      } else {
        put(path, written, overwrite);
      }
    }
  }

  /** Reads a file in parts, as they are asked for. */
  private final class Content extends FSInputStream {
    private final String path;
    private final long size;
    private long position;
    private long start;
    private byte[] held;
    private boolean closed;

    private Content(String path, long size, byte[] whole) {
      this.path = path;
      this.size = size;
      this.held = whole;
    }

    @Override
    public int available() {
      return (int) Math.min(Integer.MAX_VALUE, size - position);
    }

    @Override
    public void seek(long target) throws IOException {
      checkOpen();
      if (target < 0 || target > size) {
        throw new EOFException("position " + target + " of " + path + ", which has " + size + " bytes");
      }
      position = target;
    }

    @Override
    public long getPos() {
      return position;
    }

    @Override
    public boolean seekToNewSource(long target) {
      return false;
    }

    @Override
    public int read() throws IOException {
      byte[] one = new byte[1];
      return read(one, 0, 1) < 0 ? -1 : one[0] & 0xff;
    }

    @Override
    public int read(byte[] into, int from, int count) throws IOException {
      checkOpen();
      if (count == 0) {
        return 0;
      }
      if (position >= size) {
        return -1;
      }
      if (held == null || position < start || position >= start + held.length) {
        fetch();
      }
      int offset = (int) (position - start);
      int taken = Math.min(count, held.length - offset);
      System.arraycopy(held, offset, into, from, taken);
      position += taken;
      return taken;
    }

    @Override
    public void close() {
      closed = true;
      held = null;
    }

    private void checkOpen() throws IOException {
      if (closed) {
        throw new IOException(path + " was closed");
      }
    }

    private void fetch() throws IOException {
      long length = Math.min(PART, size - position);
      Connection.Reply reply =
          Service.call("read_file", Map.of("path", path, "run", run(), "offset", position, "length", length));
      held = new byte[reply.payload().remaining()];
      reply.payload().get(held);
      start = position;
      if (held.length == 0) {
        throw new EOFException(path + " ends at " + position + " of " + size + " bytes");
      }
      statistics.incrementBytesRead(held.length);
    }
  }
}
