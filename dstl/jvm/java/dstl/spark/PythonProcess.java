package dstl.spark;

import dstl.fs.Msgpack;
import java.io.Closeable;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.spark.SparkConf;

/**
 * A {@code python -m dstl.process}: it reads what it needs from its standard input, which is in no list of processes,
 * and answers on its standard output. The input stays open: it is the process's lease of life, unless it is detached.
 * With {@code -P} none of its modules comes from the working directory, which others may write to.
 */
final class PythonProcess implements Closeable {
  /** A start takes about a second; on a busy host, with cold disks, tens of them. */
  private static final long START_S = 60;

  /** What it has to store at its end takes seconds; Kubernetes kills the driver itself after as many. */
  private static final long END_S = 30;

  private final Process process;
  private final String program;

  PythonProcess(SparkConf conf) throws IOException {
    program = interpreter(conf);
    ProcessBuilder builder = new ProcessBuilder(program, "-P", "-m", "dstl.process");
    builder.environment().put("PYTHONUNBUFFERED", "1");
    builder.redirectError(ProcessBuilder.Redirect.INHERIT);
    try {
      process = builder.start();
    } catch (IOException error) {
      throw new IOException("dstl:// cannot start " + program + ": name a Python that has dstl-pyspark in"
          + " spark.dstl.python (" + error.getMessage() + ")", error);
    }
  }

  /** Tell the process what to be, and return what it says of itself. */
  Map<?, ?> begin(Map<String, Object> spec) throws IOException {
    try {
      OutputStream in = process.getOutputStream();
      in.write(Base64.getEncoder().encode(Msgpack.pack(spec)));
      in.write('\n');
      in.flush();
    } catch (IOException error) {
      // It has ended already, and its exit is reported below.
    }
    FutureTask<String> line = new FutureTask<>(process.inputReader(StandardCharsets.US_ASCII)::readLine);
    Thread reader = new Thread(line, "dstl-files-start");
    reader.setDaemon(true);
    reader.start();
    String said;
    try {
      said = line.get(START_S, TimeUnit.SECONDS);
    } catch (TimeoutException | ExecutionException error) {
      process.destroyForcibly();
      throw new IOException(program + " -m dstl.process does not say within " + START_S + " s where it listens", error);
    } catch (InterruptedException error) {
      process.destroyForcibly();
      throw interrupted("interrupted while " + program + " started", error);
    }
    if (said == null) {
      throw new IOException(program + " -m dstl.process ended at once: has it dstl-pyspark, of the jar's version?"
          + " Name one in spark.dstl.python; its own words are in this process's standard error");
    }
    if (!(answer(said) instanceof Map<?, ?> fields)) {
      close();
      throw new IOException(program + " -m dstl.process says something else than this jar expects: name a Python that"
          + " has dstl-pyspark, and prints nothing of its own, in spark.dstl.python");
    }
    if (fields.get("error") instanceof String error) {
      close();
      throw new IOException(error);
    }
    return fields;
  }

  /** Return whether the process has ended, or ends within this many milliseconds. */
  boolean endsWithin(long milliseconds) throws IOException {
    try {
      return process.waitFor(milliseconds, TimeUnit.MILLISECONDS);
    } catch (InterruptedException error) {
      throw interrupted("interrupted while the end of " + program + " was awaited", error);
    }
  }

  /** Return what Spark takes for the end of a query that was stopped, or of a task that was killed. */
  static IOException interrupted(String message, InterruptedException cause) {
    Thread.currentThread().interrupt();
    return (IOException) new InterruptedIOException(message).initCause(cause);
  }

  /** Let go of the process; it goes on where its spec says so. */
  void detach() {
    try {
      process.getOutputStream().close();
    } catch (IOException error) {
      // It has ended.
    }
  }

  /** End the process: what it has still to store, it stores first. */
  @Override
  public void close() {
    detach();
    try {
      if (!process.waitFor(END_S, TimeUnit.SECONDS)) {
        process.destroyForcibly();
      }
    } catch (InterruptedException error) {
      process.destroyForcibly();
      Thread.currentThread().interrupt();
    }
  }

  /** Return what a line of the process says; null where the line is not one of ours. */
  private static Object answer(String line) {
    try {
      return Msgpack.unpack(ByteBuffer.wrap(Base64.getDecoder().decode(line)));
    } catch (IllegalArgumentException | IOException error) {
      return null;
    }
  }

  private static String interpreter(SparkConf conf) {
    String environment = System.getenv().getOrDefault("PYSPARK_PYTHON", "python3");
    return conf.get("spark.dstl.python", conf.get("spark.pyspark.python", environment));
  }
}
