package dstl.spark;

import java.util.Arrays;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.UnaryOperator;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.apache.spark.sql.execution.streaming.sources.RateStreamMicroBatchInputPartition;
import org.apache.spark.sql.execution.streaming.sources.RateStreamMicroBatchReaderFactory$;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A streaming source that has something new now and then, and no rows: for batches without input. Its offsets are
 * JSON objects of numbers, the first of them by the source's name.
 *
 * <p>Options: {@code name}; and one of {@code interval_ms}, for a new offset whenever so many milliseconds have passed
 * since 1970; {@code teller}, whoever tells its offset; {@code rows}, how many there are, once.
 */
public final class QuietSource implements TableProvider {
  /** What an offset is made of; a name has no quotation marks. */
  private static final Pattern MARK = Pattern.compile("\"([^\"]*)\": *(-?\\d+)");

  /** What each teller has told; a few bytes that stay, for Spark makes its own instances of this class. */
  private static final Map<String, Map<String, Long>> TOLD = new ConcurrentHashMap<>();

  /** That of Spark's rate source, whose reader makes the rows: executors need no class of ours. */
  private static final StructType SCHEMA =
      new StructType().add("timestamp", DataTypes.TimestampType).add("value", DataTypes.LongType);

  /** Return the stream of such a source; Spark finds this class by its name, and its own loader may lack the jar. */
  public Dataset<Row> load(SparkSession session, Map<String, String> options) {
    Thread thread = Thread.currentThread();
    ClassLoader before = thread.getContextClassLoader();
    thread.setContextClassLoader(QuietSource.class.getClassLoader());
    try {
      return session.readStream().format(QuietSource.class.getName()).options(options).load();
    } finally {
      thread.setContextClassLoader(before);
    }
  }

  /** Let there be something new, where a teller's mark is another one from now on. Thread-safe. */
  public void tell(String teller, String mark, long value) {
    TOLD.computeIfAbsent(teller, each -> new ConcurrentHashMap<>()).put(mark, value);
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    return SCHEMA;
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    return new QuietTable();
  }

  private static final class QuietTable implements Table, SupportsRead {
    @Override
    public String name() {
      return "dstl";
    }

    @Override
    public Column[] columns() {
      return Arrays.stream(SCHEMA.fields())
          .map(field -> Column.create(field.name(), field.dataType()))
          .toArray(Column[]::new);
    }

    @Override
    public Set<TableCapability> capabilities() {
      return Set.of(TableCapability.MICRO_BATCH_READ);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      return () -> new QuietScan(options);
    }
  }

  private record QuietScan(CaseInsensitiveStringMap options) implements Scan {
    @Override
    public StructType readSchema() {
      return SCHEMA;
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
      String name = options.get("name");
      String teller = options.get("teller");
      long interval = options.getLong("interval_ms", 0);
      UnaryOperator<String> next = start -> offset(name, 1);
      if (teller != null) {
        next = start -> marks(start, TOLD.getOrDefault(teller, Map.of()));
      } else if (interval > 0) {
        next = start -> offset(name, System.currentTimeMillis() / interval);
      }
      return new QuietStream(name, teller == null, options.getLong("rows", 0), next);
    }
  }

  private static String offset(String name, long value) {
    return "{\"" + name + "\": " + value + "}";
  }

  /** Return an offset with the marks that were told, and those of the one before that were not. */
  private static String marks(String before, Map<String, Long> told) {
    Map<String, Object> marks = new TreeMap<>();
    Matcher mark = MARK.matcher(before);
    while (mark.find()) {
      marks.put(mark.group(1), mark.group(2));
    }
    marks.putAll(told);
    return marks.entrySet().stream()
        .map(each -> "\"" + each.getKey() + "\": " + each.getValue())
        .collect(Collectors.joining(", ", "{", "}"));
  }

  private static final class QuietStream implements MicroBatchStream, SupportsTriggerAvailableNow {
    private final String name;
    private final boolean holds;
    private final long rows;
    private final UnaryOperator<String> next;
    private Offset held;

    /** With {@code holds} there is nothing new after the begin of a run that takes what is available then. */
    QuietStream(String name, boolean holds, long rows, UnaryOperator<String> next) {
      this.name = name;
      this.holds = holds;
      this.rows = rows;
      this.next = next;
    }

    @Override
    public Offset initialOffset() {
      return new JsonOffset(offset(name, 0));
    }

    @Override
    public Offset deserializeOffset(String json) {
      return new JsonOffset(json);
    }

    @Override
    public void prepareForTriggerAvailableNow() {
      held = holds ? latestOffset() : null;
    }

    @Override
    public Offset latestOffset() {
      return latestOffset(initialOffset(), getDefaultReadLimit());
    }

    @Override
    public Offset latestOffset(Offset start, ReadLimit limit) {
      return held == null ? new JsonOffset(next.apply(start.json())) : held;
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
      return rows == 0
          ? new InputPartition[0]
          : new InputPartition[] {new RateStreamMicroBatchInputPartition(0, 1, 0, rows, 0, 1)};
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return RateStreamMicroBatchReaderFactory$.MODULE$;
    }

    @Override
    public void commit(Offset end) {}

    @Override
    public void stop() {}

    /** As the progress of a query shows it. */
    @Override
    public String toString() {
      return name;
    }
  }

  private static final class JsonOffset extends Offset {
    private final String json;

    JsonOffset(String json) {
      this.json = json;
    }

    @Override
    public String json() {
      return json;
    }
  }
}
