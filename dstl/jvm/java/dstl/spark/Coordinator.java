package dstl.spark;

import dstl.fs.Address;
import dstl.fs.OwnedRoots;
import dstl.fs.Service;
import java.io.Closeable;
import java.io.IOException;
import java.security.SecureRandom;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.stream.Collectors;
import org.apache.spark.SparkConf;
import scala.Tuple2;

/** The application's coordinator of files: a child process of the driver, started again when it has ended. */
final class Coordinator implements Closeable {
  /** As many as SHA-256 has: a longer key adds nothing to its MAC. */
  private static final int SECRET_BYTES = 32;

  /** Between the end of its socket and that of the process lie milliseconds. */
  private static final long ENDING_MS = 2_000;

  private final SparkConf conf;
  private final byte[] secret = new byte[SECRET_BYTES];
  private PythonProcess process;
  private Address address;

  Coordinator(SparkConf conf) {
    this.conf = conf;
    new SecureRandom().nextBytes(secret);
  }

  /** Return where it listens. */
  synchronized Address locate(Address lost) throws IOException {
    // Its socket closes before it has ended.
    if (process != null && !process.endsWithin(lost != null && lost == address ? ENDING_MS : 0)) {
      return address;
    }
    process = new PythonProcess(conf);
    Map<String, Object> spec = new LinkedHashMap<>();
    spec.put("member_id", "");
    spec.put("coordinator", null);
    spec.put("version", new OwnedRoots().version());
    spec.put("secret", secret);
    String host = conf.get("spark.driver.host", "127.0.0.1");
    String master = conf.get("spark.master", "");
    // Of a local master nobody comes over the network.
    boolean isAlone = master.equals("local") || master.startsWith("local[");
    spec.put("host", host);
    spec.put("bind", isAlone ? "" : conf.get("spark.driver.bindAddress", host));
    Map<String, String> options = new LinkedHashMap<>();
    options().forEach((name, value) -> options.put("spark.dstl." + name, value));
    spec.put("options", options);
    Map<?, ?> said = process.begin(spec);
    address = new Address((String) said.get("socket"), secret, ((Number) said.get("protocol")).longValue());
    return address;
  }

  /** Return where a host's service listens, or who is to start it, for that host's executor. */
  byte[] place(String host, String lost) throws IOException {
    Address own = locate(null);
    return HostService.place(own, host, lost, Service.placed(host, lost));
  }

  @Override
  public synchronized void close() {
    if (process != null) {
      process.close();
    }
  }

  /** Return the settings of DSTL, by their names behind {@code spark.dstl.}. */
  Map<String, String> options() {
    return Arrays.stream(conf.getAllWithPrefix("spark.dstl.")).collect(Collectors.toMap(Tuple2::_1, Tuple2::_2));
  }
}
