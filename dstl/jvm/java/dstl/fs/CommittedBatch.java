package dstl.fs;

import java.io.IOException;
import java.util.Map;
import java.util.UUID;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.datasources.v2.V2CommandExec;
import org.apache.spark.sql.execution.streaming.operators.stateful.StateStoreWriter;
import org.apache.spark.sql.execution.streaming.runtime.IncrementalExecution;
import org.apache.spark.sql.execution.streaming.runtime.StreamExecution;

/**
 * A batch that Spark is about to commit. Its state must be whole: what tasks put is as durable as the commit and not
 * before, so where a sink has a batch that Spark has not, and skips it (Spark's file sink does), nobody has its state.
 * The same holds for what a function given to {@code foreachBatch} has not read of it.
 */
final class CommittedBatch {
  private static final Pattern NUMBER = Pattern.compile("[0-9]{1,18}");
  /**
   * Spark's metric of stateful operators that grows with each task that has put its state: by one, and by four in a
   * join of streams, of which a batch that was read in part may pass here; its commit is refused then.
   */
  private static final String STORES = "numStateStoreInstances";

  private CommittedBatch() {}

  /**
   * Before a query's own thread puts the commit of a batch, run the batch once more, into nothing, where stateful tasks
   * of it have not run: Spark's own, or those of the StateBackend whose log has the directory. Does nothing for any
   * other file and any other thread.
   */
  static void complete(Path file) throws IOException {
    String run = TaskFile.runOfThread();
    Matcher number = NUMBER.matcher(file.getName());
    if (run.isEmpty() || !file.getParent().getName().equals("commits") || !number.matches()) {
      return;
    }
    IncrementalExecution execution = executionOf(run);
    if (execution == null || execution.currentBatchId() != Long.parseLong(file.getName())) {
      return;
    }
    SparkPlan plan = execution.executedPlan();
    // Sinks of version 2 run all tasks of a batch, and would write it again.
    if (!(plan instanceof V2CommandExec) && (lacksTasks(plan) || lacksTasks(file, run))) {
      // The batch's own rows, and not what a function may have cached of them: that would run no task.
      execution.toRdd().count();
    }
  }

  private static IncrementalExecution executionOf(String run) {
    return SparkSession.active().sharedState().activeStreamingQueries().values().stream()
        .filter(each -> each.runId().equals(UUID.fromString(run)))
        .findFirst()
        .map(StreamExecution::lastExecution)
        .orElse(null);
  }

  private static boolean lacksTasks(Path commit, String run) throws IOException {
    String path = commit.toString();
    return OwnedRoots.of(path) != null
        && Service.call("stat_batch", Map.of("path", path, "run", run)).flag("lacks_tasks");
  }

  private static boolean lacksTasks(SparkPlan plan) {
    return plan.exists(
        each -> each instanceof StateStoreWriter writer
            && each.longMetric(STORES).value() < writer.getStateInfo().numPartitions());
  }
}
