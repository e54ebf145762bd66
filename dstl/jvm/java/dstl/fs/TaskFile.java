package dstl.fs;

import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.spark.TaskContext;

/**
 * Reads what Spark says of a file's writer: a temporary file's name has the task's attempt, the file system's
 * configuration or the driver's stream thread has the run.
 */
final class TaskFile {
  /** The attempt of a file that no task has written. */
  static final long NO_ATTEMPT = -1;

  private static final String RUN = "sql.streaming.runId";
  private static final String QUERY = "sql.streaming.queryId";

  /** Of the tasks that a JVM runs at once: a checksum follows its file within the same task. */
  private static final int MOST_REMEMBERED = 4096;

  private static final Pattern TEMPORARY =
      Pattern.compile("\\.(.+)\\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:\\.TID([0-9]+))?\\.tmp");
  private static final Pattern STREAM_THREAD =
      Pattern.compile("stream execution thread for .*\\[id = [0-9a-f-]+, runId = ([0-9a-f-]+)\\]");

  /** Attempts by the file that they wrote last: a checksum's stream is opened by a thread that has no task. */
  private static final Map<String, Long> ATTEMPTS = new ConcurrentHashMap<>();

  /** Runs that Spark has made up for stores of a job that is no query's, one for each task. */
  private static final Set<String> MADE_UP = ConcurrentHashMap.newKeySet();

  private TaskFile() {}

  /** True for the name of a file that will be renamed once it is whole. */
  static boolean isTemporary(String name) {
    return TEMPORARY.matcher(name).matches();
  }

  /** Note which attempt has begun to write a file, by the temporary file's directory and name. */
  static long attemptOf(String directory, String temporary) {
    Matcher found = TEMPORARY.matcher(temporary);
    if (!found.matches()) {
      return NO_ATTEMPT;
    }
    String target = directory + "/" + found.group(1);
    if (found.group(2) == null) {
      String main = target.endsWith(".crc") ? target.substring(0, target.length() - 4) : target;
      return ATTEMPTS.getOrDefault(main, NO_ATTEMPT);
    }
    long attempt = Long.parseLong(found.group(2));
    if (ATTEMPTS.size() > MOST_REMEMBERED) {
      ATTEMPTS.clear();
    }
    ATTEMPTS.put(target, attempt);
    return attempt;
  }

  /**
   * Return the run whose files this thread writes; empty where none is known, and for a job that is no query's, as
   * the one that repartitions state: its files become durable with the barriers of its driver, which has no run.
   */
  static String writer(Configuration configuration) {
    String run = run(configuration);
    TaskContext task = TaskContext.get();
    if (task != null && task.getLocalProperty(QUERY) == null) {
      if (MADE_UP.size() > MOST_REMEMBERED) {
        MADE_UP.clear();
      }
      MADE_UP.add(run);
    }
    return MADE_UP.contains(run) ? "" : run;
  }

  /**
   * Return the run that puts a file. A query's {@code metadata} is of none: Spark writes it where the query is started,
   * which may be the thread of another query's run.
   */
  static String writer(Path file, Configuration configuration) {
    boolean begins = file.getName().equals("metadata") && !file.getParent().getName().equals("_metadata");
    return begins ? "" : writer(configuration);
  }

  /** Return the run of the query that this thread works for; empty where none is known. */
  static String run(Configuration configuration) {
    String run = runOfThread();
    return run.isEmpty() ? configuration.get(RUN, "") : run;
  }

  /** Return the run whose own thread this is, which makes its batches; empty where it is another. */
  static String runOfThread() {
    Matcher thread = STREAM_THREAD.matcher(Thread.currentThread().getName());
    return thread.find() ? thread.group(1) : "";
  }
}
