package dstl.spark;

import dstl.fs.Address;
import dstl.fs.Msgpack;
import dstl.fs.OwnedRoots;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.SparkConf;

/**
 * What the driver tells an executor of its host's file service. It goes through Spark's own RPC, and holds the secret.
 *
 * @param fields as {@link #place} has packed them
 */
record HostService(Map<?, ?> fields) {
  /** Pack what the coordinator has said of a host for its executor. */
  static byte[] place(Address coordinator, String host, String lost, Map<?, ?> placed) throws IOException {
    Map<String, Object> fields = new LinkedHashMap<>();
    placed.forEach((name, value) -> fields.put(String.valueOf(name), value));
    fields.put("secret", coordinator.secret());
    fields.put("protocol", coordinator.protocol());
    return Msgpack.pack(fields);
  }

  /** Unpack it in the executor. */
  static HostService read(byte[] packed) throws IOException {
    if (Msgpack.unpack(ByteBuffer.wrap(packed)) instanceof Map<?, ?> fields) {
      return new HostService(fields);
    }
    throw new IOException("the driver says something else than this jar expects: is it the same on both sides?");
  }

  boolean isThere() {
    return !((String) fields.get("socket")).isEmpty();
  }

  boolean isToBeLaunched() {
    return !((String) fields.get("member")).isEmpty();
  }

  Address address() {
    return new Address((String) fields.get("socket"), secret(), ((Number) fields.get("protocol")).longValue());
  }

  /** Start the service: it outlives this executor, and ends with the coordinator. */
  void launch(SparkConf conf, String host) throws IOException {
    Map<String, Object> spec = new LinkedHashMap<>();
    spec.put("version", new OwnedRoots().version());
    spec.put("secret", secret());
    spec.put("host", host);
    spec.put("bind", host);
    spec.put("member_id", fields.get("member"));
    spec.put("coordinator", List.of(fields.get("coordinator_host"), fields.get("coordinator_port")));
    spec.put("detached", true);
    PythonProcess process = new PythonProcess(conf);
    process.begin(spec);
    process.detach();
  }

  private byte[] secret() {
    return (byte[]) fields.get("secret");
  }
}
