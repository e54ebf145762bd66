import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.functions;
import org.apache.spark.sql.streaming.StreamingQuery;
import org.apache.spark.sql.streaming.Trigger;

/** A job without Python: two queries at once, each with a checkpoint directory of its own, over one input. */
public final class CountJob {
  private CountJob() {}

  /** Arguments: the input's directory, and the URI below which the checkpoints are. */
  public static void main(String[] arguments) throws Exception {
    SparkSession spark = SparkSession.builder().getOrCreate();
    List<StreamingQuery> queries = new ArrayList<>();
    for (String provider : List.of("RocksDB", "HDFSBacked")) {
      spark.conf().set(
          "spark.sql.streaming.stateStore.providerClass",
          "org.apache.spark.sql.execution.streaming.state." + provider + "StateStoreProvider");
      Dataset<Row> events =
          spark.readStream().schema("k STRING, v BIGINT").option("maxFilesPerTrigger", 1).json(arguments[0]);
      queries.add(
          events
              .groupBy("k")
              .agg(functions.count("*").as("n"), functions.sum("v").as("total"))
              .writeStream()
              .outputMode("update")
              .format("noop")
              .option("checkpointLocation", arguments[1] + "/" + provider)
              .trigger(Trigger.AvailableNow())
              .start());
    }
    for (StreamingQuery each : queries) {
      each.awaitTermination();
    }
    spark.stop();
  }
}
