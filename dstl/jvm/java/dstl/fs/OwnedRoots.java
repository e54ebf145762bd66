package dstl.fs;

import java.util.Comparator;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;

/**
 * The checkpoint directories that lie in the log of a StateBackend: its driver program in Python serves them, and
 * nothing else. All instances are one: the driver program makes one by reflection, for py4j does not see every class
 * loader. Thread-safe.
 */
public final class OwnedRoots {
  private static final Map<String, ConnectionPool> OWNERS = new ConcurrentHashMap<>();

  /** Say who serves a root, in place of the one that served it before. */
  public void own(String root, String socket, byte[] secret, long protocol) {
    ConnectionPool before = OWNERS.put(plain(root), new ConnectionPool(new Address(socket, secret, protocol)));
    if (before != null) {
      before.close();
    }
  }

  /** Return the version of this jar; empty where it has none. */
  public String version() {
    String version = OwnedRoots.class.getPackage().getImplementationVersion();
    return version == null ? "" : version;
  }

  /** Return who serves a path, or null for one that belongs to no StateBackend of this driver. */
  static ConnectionPool of(String path) {
    String below = plain(path);
    return OWNERS.keySet().stream()
        .filter(root -> below.equals(root) || below.startsWith(root + "/"))
        .max(Comparator.comparingInt(String::length))
        .map(OWNERS::get)
        .orElse(null);
  }

  /** Hadoop's paths of no authority have one slash, a root's URI three. */
  private static String plain(String path) {
    return path.replaceFirst("dstl:/*", "");
  }
}
