package dstl.fs;

import java.io.Closeable;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.Deque;
import java.util.Map;
import java.util.concurrent.ConcurrentLinkedDeque;

/** Connections to one service, kept open between calls. Thread-safe. */
final class ConnectionPool implements Closeable {
  /** As many as an executor's tasks use at once, and more: each idle one costs a descriptor on both sides. */
  private static final int MOST_IDLE = 64;

  private final Address address;
  private final Deque<Connection> idle = new ConcurrentLinkedDeque<>();

  ConnectionPool(Address address) {
    this.address = address;
  }

  Address address() {
    return address;
  }

  /**
   * Send a request and return its reply. A connection that has ended while nobody used it says nothing of the service:
   * where the request may be sent again, it is, once, over a new one, and none of the others is used any more.
   */
  Connection.Reply call(String name, Map<String, Object> fields, ByteBuffer content) throws IOException {
    Connection kept = idle.poll();
    if (kept != null) {
      try {
        return call(kept, name, fields, content.duplicate());
      } catch (Connection.Ended error) {
        if (!error.mayRepeat(name)) {
          throw error;
        }
        close();
      }
    }
    return call(connect(), name, fields, content);
  }

  /** Return a connection of the caller's own. */
  Connection connect() throws IOException {
    return new Connection(address);
  }

  @Override
  public void close() {
    for (Connection each = idle.poll(); each != null; each = idle.poll()) {
      each.close();
    }
  }

  private Connection.Reply call(
      Connection connection, String name, Map<String, Object> fields, ByteBuffer content) throws IOException {
    try {
      return connection.call(name, fields, content);
    } finally {
      if (connection.isOpen() && idle.size() < MOST_IDLE) {
        idle.push(connection);
      } else {
        connection.close();
      }
    }
  }
}
