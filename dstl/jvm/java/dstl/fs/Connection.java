package dstl.fs;

import java.io.Closeable;
import java.io.EOFException;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.ClosedByInterruptException;
import java.nio.channels.SocketChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.UserPrincipal;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.security.SecureRandom;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import jdk.net.ExtendedSocketOptions;
import org.apache.hadoop.fs.FileAlreadyExistsException;

/**
 * A blocking connection to a service of this host over its unix socket: frames and handshake are those of
 * {@code dstl/rpc}. Both ends ask the kernel whose process the other one is, so frames carry no MAC. Not thread-safe.
 */
final class Connection implements Closeable {
  /** The limits of {@code dstl/rpc/protocol.py}: both sides keep the same. */
  private static final int MAX_FRAME = 256 << 20;

  private static final int MAX_HANDSHAKE = 1024;
  private static final int MAX_HEADER = 16 << 20;
  private static final int NONCE_BYTES = 32;

  /** A service that is at a call says so by a frame of this field, every ten seconds. */
  private static final String BEAT = "working";

  /**
   * A service that hangs is silent in so many looks: 50 s, the SILENCE_S of {@code dstl/rpc/protocol.py}. They are
   * counted, for a JVM that stood still itself has looked once in all that time.
   */
  private static final int LOOKS = 5;

  /** From one look to the next. Tests have less time. */
  static long lookMs = 10_000;

  private static final String ROLE = "worker";
  private static final Set<String> REASONS = Set.of("address", "busy", "malformed", "secret", "version");
  private static final SecureRandom RANDOM = new SecureRandom();
  private static final UserPrincipal SELF = self();
  private static final ScheduledThreadPoolExecutor WATCHDOG = watchdog();

  private final SocketChannel channel;
  private final String where;
  private long received;
  private volatile long moved;
  private volatile boolean isLate;

  /** A reply: its header's fields, and the bytes that follow them. */
  record Reply(Map<?, ?> fields, ByteBuffer payload) {
    long number(String name) {
      return ((Number) fields.get(name)).longValue();
    }

    boolean flag(String name) {
      return (Boolean) fields.get(name);
    }

    List<?> list(String name) {
      return (List<?>) fields.get(name);
    }
  }

  /** The service has ended the connection, was not there, or has not let this JVM in. */
  static final class Ended extends IOException {
    private static final long serialVersionUID = 1;

    private final boolean isUnsent;
    private final boolean isUnanswered;

    private Ended(String message, IOException cause, boolean isUnsent, boolean isUnanswered) {
      super(message, cause);
      this.isUnsent = isUnsent;
      this.isUnanswered = isUnanswered;
    }

    /** True where the request was not seen, or does no harm a second time. */
    boolean mayRepeat(String name) {
      return isUnsent || isUnanswered && !name.equals("put_file");
    }
  }

  /** The service is there, and has not answered in time: its process hangs. */
  static final class Late extends IOException {
    private static final long serialVersionUID = 1;

    private Late(String message, Throwable cause) {
      super(message, cause);
    }
  }

  Connection(Address address) throws IOException {
    where = address.socket();
    channel = SocketChannel.open(StandardProtocolFamily.UNIX);
    ScheduledFuture<?> guard = guard();
    try {
      connect();
      checkPeer();
      shakeHands(address);
    } catch (ClosedByInterruptException error) {
      throw error;
    } catch (IOException error) {
      close();
      throw new Ended(isLate ? silence() : error.getMessage(), error, true, true);
    } catch (RuntimeException error) {
      close();
      throw new IOException("what answers at " + where + " is not a DSTL service", error);
    } catch (GeneralSecurityException error) {
      close();
      throw new IOException("this Java has no HmacSHA256", error);
    } finally {
      guard.cancel(false);
    }
  }

  /**
   * Send a request and return its reply, which may take as long as the service is at it. A connection that failed on
   * the wire is closed.
   */
  Reply call(String name, Map<String, Object> fields, ByteBuffer payload) throws IOException {
    Map<String, Object> header = new LinkedHashMap<>(fields);
    header.put("call", name);
    ScheduledFuture<?> guard = guard();
    boolean isSent = false;
    Reply reply;
    try {
      send(header, payload);
      isSent = true;
      do {
        received = 0;
        reply = receive(MAX_FRAME);
      } while (reply.fields().containsKey(BEAT));
    } catch (ClosedByInterruptException error) {
      // Of Spark, which knows it: the query was stopped, or the task killed.
      throw error;
    } catch (IOException | RuntimeException error) {
      close();
      String why = isLate ? silence() : "the DSTL file service at " + where + " has ended";
      String message = why + " (during " + name + ")";
      if (isLate) {
        throw new Late(message, error);
      }
      if (!(error instanceof IOException cause)) {
        throw new IOException(message, error);
      }
      throw new Ended(message, cause, !isSent, received == 0);
    } finally {
      guard.cancel(false);
    }
    if (reply.fields().get("error") instanceof List<?> error) {
      throw raised(String.valueOf(error.get(0)), String.valueOf(error.get(1)));
    }
    return reply;
  }

  String where() {
    return where;
  }

  boolean isOpen() {
    return channel.isOpen();
  }

  @Override
  public void close() {
    try {
      channel.close();
    } catch (IOException error) {
      // Nothing is left to be done with it.
    }
  }

  private static IOException raised(String kind, String message) {
    return switch (kind) {
      case "ObjectNotFound" -> new FileNotFoundException(message);
      case "ObjectExists" -> new FileAlreadyExistsException(message);
      default -> new IOException("dstl.errors." + kind + ": " + message);
    };
  }

  /** Connect; where a service that hangs has a full queue already, this waits until the guard closes the channel. */
  private void connect() throws IOException {
    try {
      channel.connect(UnixDomainSocketAddress.of(Path.of(where)));
    } catch (ClosedByInterruptException error) {
      throw error;
    } catch (IOException error) {
      throw new IOException("no DSTL file service answers at " + where + ": " + error.getMessage(), error);
    }
  }

  private String silence() {
    return "the DSTL file service at " + where + " gave no sign of life for " + LOOKS * lookMs / 1000 + " s";
  }

  /** Refuse a process of another user: the path may have been made anew by anybody. */
  private void checkPeer() throws IOException {
    UserPrincipal peer = channel.getOption(ExtendedSocketOptions.SO_PEERCRED).user();
    if (!peer.equals(SELF)) {
      throw new IOException("the process that listens at " + where + " is of user " + peer.getName() + ", not "
          + (SELF == null ? "known to be this one's" : SELF.getName()));
    }
  }

  /** Return the user of this process, as whose a new file is made; null where none can be made. */
  private static UserPrincipal self() {
    try {
      Path made = Files.createTempFile("dstl-user", null);
      try {
        return Files.getOwner(made);
      } finally {
        Files.delete(made);
      }
    } catch (IOException error) {
      return null;
    }
  }

  private void shakeHands(Address address) throws IOException, GeneralSecurityException {
    Reply challenge = receive(MAX_HANDSHAKE);
    refuse(challenge);
    if (!(challenge.fields().get("nonce") instanceof byte[] theirs) || theirs.length != NONCE_BYTES) {
      throw new IOException("what answers at " + where + " is not a DSTL service");
    }
    long version = challenge.number("version");
    if (version != address.protocol()) {
      throw new IOException(
          "the service at " + where + " speaks protocol " + version + ", this application " + address.protocol()
              + ": run the same version of DSTL on both sides");
    }
    byte[] own = new byte[NONCE_BYTES];
    RANDOM.nextBytes(own);
    byte[] proof = proof(address, version, "client", theirs, own);
    send(
        Map.of("version", version, "nonce", own, "role", ROLE, "dialled", where, "reached", "", "proof", proof),
        ByteBuffer.allocate(0));
    Reply last = receive(MAX_HANDSHAKE);
    refuse(last);
    byte[] expected = proof(address, version, "server", theirs, own);
    if (!(last.fields().get("proof") instanceof byte[] given) || !MessageDigest.isEqual(expected, given)) {
      throw new IOException(
          "what is at " + where + " does not know this application's secret; is it of another application?");
    }
  }

  private void refuse(Reply reply) throws IOException {
    Object reason = reply.fields().get("refused");
    if (reason != null) {
      // It has proved nothing yet: only words that are known are repeated.
      String why = reason instanceof String word && REASONS.contains(word) ? " (" + word + ")" : "";
      throw new IOException("the DSTL file service at " + where + " refuses this JVM" + why + "; see its log");
    }
  }

  private byte[] proof(Address address, long version, String side, byte[] theirs, byte[] own)
      throws IOException, GeneralSecurityException {
    Mac mac = Mac.getInstance("HmacSHA256");
    mac.init(new SecretKeySpec(address.secret(), "HmacSHA256"));
    return mac.doFinal(Msgpack.pack(List.of(version, side, ROLE, where, "", theirs, own)));
  }

  private void send(Map<String, Object> header, ByteBuffer payload) throws IOException {
    byte[] packed = Msgpack.pack(header);
    ByteBuffer front = ByteBuffer.allocate(8 + packed.length);
    front.putInt(4 + packed.length + payload.remaining()).putInt(packed.length).put(packed).flip();
    ByteBuffer[] frame = {front, payload};
    while (front.hasRemaining() || payload.hasRemaining()) {
      moved += channel.write(frame);
    }
  }

  private Reply receive(int limit) throws IOException {
    int length = read(4).getInt();
    if (length < 4 || length > limit) {
      throw new IOException("a frame declares " + length + " bytes; the limit is " + limit);
    }
    ByteBuffer body = read(length);
    int size = body.getInt();
    if (size < 0 || size > Math.min(MAX_HEADER, body.remaining())) {
      throw new IOException("a frame declares a header of " + size + " bytes");
    }
    ByteBuffer header = body.slice(body.position(), size);
    body.position(body.position() + size);
    if (!(Msgpack.unpack(header) instanceof Map<?, ?> fields)) {
      throw new IOException("a frame's header is not a map");
    }
    return new Reply(fields, body.slice());
  }

  private ByteBuffer read(int length) throws IOException {
    ByteBuffer buffer = ByteBuffer.allocate(length);
    while (buffer.hasRemaining()) {
      int count = channel.read(buffer);
      if (count < 0) {
        throw new EOFException("the service has ended the connection");
      }
      received += count;
      moved += count;
    }
    return buffer.flip();
  }

  /** Close the channel, which has no time-out of its own, when nothing moves; until the future is cancelled. */
  private ScheduledFuture<?> guard() {
    return WATCHDOG.scheduleWithFixedDelay(new Look(), lookMs, lookMs, TimeUnit.MILLISECONDS);
  }

  private final class Look implements Runnable {
    private long seen = moved;
    private int silent;

    @Override
    public void run() {
      silent = moved == seen ? silent + 1 : 0;
      seen = moved;
      if (silent >= LOOKS) {
        // First: who waits for the answer is woken by the close, before this task counts as done.
        isLate = true;
        close();
      }
    }
  }

  private static ScheduledThreadPoolExecutor watchdog() {
    ScheduledThreadPoolExecutor executor =
        new ScheduledThreadPoolExecutor(
            1,
            work -> {
              Thread thread = new Thread(work, "dstl-watchdog");
              thread.setDaemon(true);
              return thread;
            });
    executor.setRemoveOnCancelPolicy(true);
    return executor;
  }
}
