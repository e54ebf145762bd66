package dstl.fs;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.Random;

/** Connects to a socket a number of times and prints a line on each, decodes what was drawn, or meets a hung service. */
public final class ConnectionTrial {
  private static final int[] MARKERS = {0x80, 0x90, 0x9f, 0xc4, 0xc6, 0xda, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xcb, 0xff};

  private ConnectionTrial() {}

  public static void main(String[] arguments) throws Exception {
    Connection.lookMs = 400;
    if (arguments[0].equals("decode")) {
      decode(new Random(Long.parseLong(arguments[1])), Integer.parseInt(arguments[2]));
      return;
    }
    if (arguments[0].equals("late")) {
      late(arguments[1], arguments[2], arguments[3].getBytes(), Long.parseLong(arguments[4]));
      return;
    }
    for (int i = 0; i < Integer.parseInt(arguments[1]); i++) {
      try (Connection connection = new Connection(new Address(arguments[0], new byte[32], 7))) {
        System.out.println("connected");
      } catch (Exception error) {
        System.out.println((error instanceof java.io.IOException ? "IOException" : error.getClass().getSimpleName()) + ": " + error.getMessage());
      }
    }
    System.exit(0);
  }

  /** Asks the first service until it hangs, and says of each line of the input what the next call comes to. */
  private static void late(String first, String second, byte[] secret, long protocol) throws Exception {
    Service.use(lost -> new Address(lost == null ? first : second, secret, protocol), false);
    Connection lease = Service.lease("");
    java.util.Scanner lines = new java.util.Scanner(System.in);
    while (lines.hasNextLine()) {
      String path = lines.nextLine();
      try {
        if (path.equals("part")) {
          Service.stage(lease, "token", ByteBuffer.allocate(1));
        } else {
          Service.call("stat_file", java.util.Map.of("path", path, "run", "run"), ByteBuffer.allocate(0));
        }
        System.out.println("answered");
      } catch (IOException error) {
        System.out.println(error.getMessage());
      }
    }
    System.exit(0);
  }

  /** What is neither a value nor an IOException ends this with its stack. */
  private static void decode(Random random, int count) {
    int values = 0;
    for (int i = 0; i < count; i++) {
      byte[] drawn = new byte[random.nextInt(60)];
      random.nextBytes(drawn);
      for (int at = random.nextInt(4); at < drawn.length; at += 1 + random.nextInt(8)) {
        drawn[at] = (byte) MARKERS[random.nextInt(MARKERS.length)];
      }
      try {
        Msgpack.unpack(ByteBuffer.wrap(drawn));
        values++;
      } catch (IOException error) {
        // Refused, as it should be.
      }
    }
    // Nested lists, of which each declares all that is left: with room for them, gigabytes.
    ByteBuffer nested = ByteBuffer.allocate(16 << 20);
    while (nested.remaining() > 4 && nested.position() < 80) {
      nested.put((byte) 0xdd).putInt(nested.remaining() - 4);
    }
    String said = "a value";
    try {
      Msgpack.unpack(nested.rewind());
    } catch (IOException error) {
      said = "refused";
    }
    System.out.println(values + " values; nested lists: " + said);
  }
}
