package dstl.fs;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.hadoop.conf.Configuration;

/** The file service of this JVM's host: found once, called over pooled connections. Thread-safe. */
public final class Service {
  /** A run ends within its query; what is older is of queries that have ended long ago. */
  private static final int MOST_RUNS = 10_000;

  private static final Map<String, String> RUNS = new ConcurrentHashMap<>();
  private static volatile Locator locator;
  private static volatile boolean remembersRuns;
  private static volatile Map<String, String> settings;
  private static ConnectionPool pool;
  private static Address unanswering;

  private Service() {}

  /** Finds, and where need be starts, this host's service. */
  @FunctionalInterface
  public interface Locator {
    /** Return where it listens; {@code lost} is where nothing answers any more, or null. */
    Address locate(Address lost) throws IOException;
  }

  /**
   * Say how the service is found.
   *
   * @param found null: it is no longer found
   * @param isCoordinator a run of a query ends with the service that it has begun with: what tasks have put into a
   *     coordinator that has ended is lost, and no other one knows of it
   */
  public static synchronized void use(Locator found, boolean isCoordinator) {
    locator = found;
    drop();
    unanswering = null;
    remembersRuns = isCoordinator;
    RUNS.clear();
  }

  /** Say with which {@code spark.dstl.*} settings, without that prefix, the application has started; null: it ends. */
  public static void started(Map<String, String> options) {
    settings = options;
  }

  /** Refuse options that a session sets: they are no longer read. */
  static void check(Configuration session) throws IOException {
    Map<String, String> known = settings;
    if (known == null) {
      return;
    }
    for (Map.Entry<String, String> each : session.getPropsWithPrefix("spark.dstl.").entrySet()) {
      if (!each.getValue().equals(known.get(each.getKey()))) {
        throw new IOException("dstl.errors.Invalid: spark.dstl." + each.getKey() + "=" + each.getValue()
            + " is set in a session of a running application, where it changes nothing: set it before the application"
            + " starts, in its first SparkSession.builder or with spark-submit --conf");
      }
    }
  }

  /** True where a plugin has said how the service is found. */
  public static boolean isConfigured() {
    return locator != null;
  }

  static Connection.Reply call(String name, Map<String, Object> fields) throws IOException {
    return call(name, fields, ByteBuffer.allocate(0));
  }

  /** Return a connection for the parts of one file: they are its service's for as long as it is open. */
  static Connection lease(String path) throws IOException {
    ConnectionPool owned = OwnedRoots.of(path);
    if (owned != null) {
      return owned.connect();
    }
    ConnectionPool known = located(null);
    try {
      return known.connect();
    } catch (Connection.Ended error) {
      return located(known.address()).connect();
    }
  }

  /** Bring bytes of a file that is not whole yet. */
  static void stage(Connection lease, String token, ByteBuffer content) throws IOException {
    try {
      lease.call("stage_part", Map.of("token", token), content);
    } catch (Connection.Late error) {
      ConnectionPool known = known();
      if (known != null && known.address().socket().equals(lease.where())) {
        giveUp(known);
      }
      throw error;
    }
  }

  /** Send a request to the service of its path, or to this host's, and return its reply. */
  static Connection.Reply call(String name, Map<String, Object> fields, ByteBuffer content) throws IOException {
    ConnectionPool owned = fields.get("path") instanceof String path ? OwnedRoots.of(path) : null;
    if (owned != null) {
      try {
        return owned.call(name, fields, content);
      } catch (Connection.Ended error) {
        throw new IOException("dstl.errors.Closed: the StateBackend of " + fields.get("path") + " does not answer:"
            + " close() it behind the end of its query; define a query anew with a new one (" + error.getMessage()
            + ")", error);
      }
    }
    ConnectionPool known = located(null);
    check(known, fields);
    try {
      return known.call(name, fields, content.duplicate());
    } catch (Connection.Ended error) {
      if (!error.mayRepeat(name)) {
        throw error;
      }
    } catch (Connection.Late error) {
      giveUp(known);
      throw error;
    }
    // Its process may have ended: what started it may start another.
    known = located(known.address());
    check(known, fields);
    return known.call(name, fields, content);
  }

  /** Ask the coordinator where a host's service is; for the driver. */
  public static Map<?, ?> placed(String host, String lost) throws IOException {
    return call("place_files", Map.of("host", host, "lost", lost)).fields();
  }

  /** Tell the coordinator that a run of a query has ended. */
  public static void ended(String run) {
    ConnectionPool known = known();
    if (known == null) {
      return;
    }
    RUNS.remove(run);
    try {
      known.call("end_run", Map.of("run", run), ByteBuffer.allocate(0));
    } catch (IOException error) {
      // It has ended, and its directories with it; or it keeps this one open until the application ends.
    }
  }

  private static void check(ConnectionPool pool, Map<String, Object> fields) throws IOException {
    if (!remembersRuns || !(fields.get("run") instanceof String run) || run.isEmpty()) {
      return;
    }
    if (RUNS.size() > MOST_RUNS) {
      RUNS.clear();
    }
    String where = pool.address().socket();
    String known = RUNS.putIfAbsent(run, where);
    if (known != null && !known.equals(where)) {
      throw new IOException(
          "dstl.errors.TaskManagerLost: the coordinator of dstl:// has ended during run " + run
              + ", and what its tasks had written with it: restart the query");
    }
  }

  private static synchronized ConnectionPool located(Address lost) throws IOException {
    Locator found = locator;
    if (found == null) {
      throw new IOException(
          "dstl:// needs its plugin: set spark.plugins=dstl.spark.DstlPlugin and spark.jars to what"
              + " dstl.spark.jar_path() prints, before the session is made");
    }
    if (pool == null || pool.address() == lost) {
      drop();
      pool = new ConnectionPool(found.locate(lost == null ? unanswering : lost));
      unanswering = null;
    }
    return pool;
  }

  /** Let the next call find another process: one that hangs would hold it up as it did this one. */
  private static synchronized void giveUp(ConnectionPool late) {
    if (pool == late) {
      unanswering = late.address();
      drop();
    }
  }

  private static synchronized ConnectionPool known() {
    return pool;
  }

  private static void drop() {
    if (pool != null) {
      pool.close();
    }
    pool = null;
  }
}
