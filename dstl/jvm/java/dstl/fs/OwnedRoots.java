package dstl.fs;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.Deque;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedDeque;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * The checkpoint directories that lie in the log of a StateBackend: its driver program in Python serves them, and
 * nobody else. Thread-safe.
 */
public final class OwnedRoots {
  private static final int MOST_IDLE = 16;
  private static final Pattern OWNED = Pattern.compile("dstl:/*(.*?/_spark)(?:/.*)?");
  private static final Map<String, Owner> OWNERS = new ConcurrentHashMap<>();

  private OwnedRoots() {}

  /** Say who serves a root, in the place of whoever has served it before. */
  public static void own(String root, String socket, byte[] secret, long protocol) {
    Matcher found = OWNED.matcher(root);
    if (!found.matches()) {
      throw new IllegalArgumentException(root + " is no checkpoint directory of a StateBackend");
    }
    Owner before = OWNERS.put(found.group(1), new Owner(new Address(socket, secret, protocol)));
    if (before != null) {
      before.close();
    }
  }

  /** Return the version of this jar; empty where it has none. */
  public static String version() {
    String version = OwnedRoots.class.getPackage().getImplementationVersion();
    return version == null ? "" : version;
  }

  /** Return who serves a path, or null for one that belongs to no StateBackend. */
  static Owner of(String path) throws IOException {
    Matcher found = OWNED.matcher(path);
    if (!found.matches()) {
      return null;
    }
    Owner owner = OWNERS.get(found.group(1));
    if (owner == null) {
      throw new IOException(
          "dstl.errors.Invalid: " + path + " lies in the log of a StateBackend, and this JVM has none there: ask it for"
              + " checkpoint_location in this very driver, and keep Spark's own stateful operators out of the query,"
              + " whose executors would write there");
    }
    return owner;
  }

  /** The service of one driver program. */
  static final class Owner {
    private final Address address;
    private final Deque<Connection> idle = new ConcurrentLinkedDeque<>();

    private Owner(Address address) {
      this.address = address;
    }

    Connection.Reply call(String name, Map<String, Object> fields, ByteBuffer content, long timeoutMs)
        throws IOException {
      Connection connection = taken();
      try {
        return connection.call(name, fields, content, timeoutMs);
      } finally {
        if (connection.isOpen() && idle.size() < MOST_IDLE) {
          idle.push(connection);
        } else {
          connection.close();
        }
      }
    }

    Connection taken() throws IOException {
      Connection connection = idle.poll();
      return connection != null && connection.isOpen() ? connection : new Connection(address);
    }

    private void close() {
      for (Connection each = idle.poll(); each != null; each = idle.poll()) {
        each.close();
      }
    }
  }
}
