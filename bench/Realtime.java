package bench;

import java.io.Serializable;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CopyOnWriteArrayList;
import org.apache.spark.api.java.function.MapFunction;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Encoder;
import org.apache.spark.sql.Encoders;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.RowFactory;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;
import org.apache.spark.sql.streaming.OutputMode;
import org.apache.spark.sql.streaming.StatefulProcessor;
import org.apache.spark.sql.streaming.TTLConfig;
import org.apache.spark.sql.streaming.TimeMode;
import org.apache.spark.sql.streaming.TimerValues;
import org.apache.spark.sql.streaming.ValueState;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.jdk.javaapi.CollectionConverters;

/**
 * The source, the sink and the JVM's processor of {@code bench realtime}. Row n of the source is due at n / rate seconds
 * of the wall clock, and has that time; it keeps nothing, so any range can be read again. The sink has a row when the
 * row's batch is committed in it.
 */
public final class Realtime implements TableProvider {
  private static final StructType ROWS = StructType.fromDDL("k BIGINT, ts BIGINT");
  private static final StructType COUNTS = StructType.fromDDL("k BIGINT, n BIGINT, ts BIGINT");
  private static final List<long[]> COMMITTED = new CopyOnWriteArrayList<>();

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    return ROWS;
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    return new Place();
  }

  @Override
  public boolean supportsExternalMetadata() {
    return true;
  }

  /** Return the sorted latencies, in milliseconds, of the rows that were due in a time, as far as they have come. */
  public static long[] latencies(long fromMs, long untilMs) {
    return COMMITTED.stream()
        .flatMapToLong(
            batch -> Arrays.stream(batch, 1, batch.length).filter(ts -> ts >= fromMs && ts < untilMs).map(ts -> batch[0] - ts))
        .sorted()
        .toArray();
  }

  /** Return the latencies at these shares of {@link #latencies}, and their number at last. */
  public static long[] summary(long fromMs, long untilMs, List<Double> shares) {
    long[] sorted = latencies(fromMs, untilMs);
    long[] found = new long[shares.size() + 1];
    for (int i = 0; i < shares.size() && sorted.length > 0; i++) {
      found[i] = sorted[(int) Math.min(sorted.length - 1L, (long) (sorted.length * shares.get(i)))];
    }
    found[shares.size()] = sorted.length;
    return found;
  }

  /** Count by key: one get and one update a row. */
  public static Dataset<Row> counted(Dataset<Row> rows) {
    MapFunction<Row, Long> key = row -> row.getLong(0);
    return rows.groupByKey(key, Encoders.LONG())
        .transformWithState(new Count(), TimeMode.None(), OutputMode.Append(), Encoders.row(COUNTS));
  }

  private static final class Count extends StatefulProcessor<Long, Row, Row> {
    private transient ValueState<Long> seen;

    @Override
    public void init(OutputMode outputMode, TimeMode timeMode) {
      Encoder<Long> encoder = Encoders.LONG();
      seen = getHandle().getValueState("seen", encoder, TTLConfig.NONE());
    }

    @Override
    public scala.collection.Iterator<Row> handleInputRows(
        Long key, scala.collection.Iterator<Row> rows, TimerValues timerValues) {
      return rows.map(
          row -> {
            long n = (seen.exists() ? seen.get() : 0L) + 1;
            seen.update(n);
            return RowFactory.create(key, n, row.getLong(1));
          });
    }
  }

  private static final class Place implements SupportsRead, SupportsWrite {
    @Override
    public String name() {
      return "realtime";
    }

    @Override
    @SuppressWarnings("deprecation")
    public StructType schema() {
      return ROWS;
    }

    @Override
    public Set<TableCapability> capabilities() {
      return Set.of(
          TableCapability.MICRO_BATCH_READ, TableCapability.STREAMING_WRITE, TableCapability.ACCEPT_ANY_SCHEMA);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      Rows rows = new Rows(options.getLong("rate", 1000), options.getLong("keys", 50_000), options.getInt("splits", 5));
      return () ->
          new Scan() {
            @Override
            public StructType readSchema() {
              return ROWS;
            }

            @Override
            public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
              return rows;
            }
          };
    }

    @Override
    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
      return new WriteBuilder() {
        @Override
        public Write build() {
          return new Write() {
            @Override
            public StreamingWrite toStreaming() {
              return new Sink();
            }
          };
        }
      };
    }
  }

  private static final class At extends Offset {
    private final long row;

    private At(long row) {
      this.row = row;
    }

    @Override
    public String json() {
      return Long.toString(row);
    }
  }

  private record Split(long from, long until, long step, long rate, long keys) implements InputPartition {}

  private record Rows(long rate, long keys, int splits) implements MicroBatchStream {
    @Override
    public Offset initialOffset() {
      return latestOffset();
    }

    @Override
    public Offset latestOffset() {
      return new At(System.currentTimeMillis() * rate / 1000);
    }

    @Override
    public Offset deserializeOffset(String json) {
      return new At(Long.parseLong(json));
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
      InputPartition[] found = new InputPartition[splits];
      for (int i = 0; i < splits; i++) {
        found[i] = new Split(((At) start).row + i, ((At) end).row, splits, rate, keys);
      }
      return found;
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return new Readers();
    }

    @Override
    public void commit(Offset end) {}

    @Override
    public void stop() {}
  }

  private static final class Readers implements PartitionReaderFactory {
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      Split split = (Split) partition;
      return new PartitionReader<>() {
        private long row = split.from - split.step;

        @Override
        public boolean next() {
          row += split.step;
          return row < split.until;
        }

        @Override
        public InternalRow get() {
          // Neighbours have keys far apart, and each key comes as often as any other.
          long key = Long.remainderUnsigned(row * 0x9E3779B97F4A7C15L >>> 16, split.keys);
          return new GenericInternalRow(new Object[] {key, row * 1000 / split.rate});
        }

        @Override
        public void close() {}
      };
    }
  }

  private record Written(long[] times) implements WriterCommitMessage {}

  private static final class Sink implements StreamingWrite {
    @Override
    public StreamingDataWriterFactory createStreamingWriterFactory(PhysicalWriteInfo info) {
      return new Writers();
    }

    @Override
    public boolean useCommitCoordinator() {
      return false;
    }

    @Override
    public void commit(long epochId, WriterCommitMessage[] messages) {
      long now = System.currentTimeMillis();
      long[] batch =
          java.util.stream.LongStream.concat(
                  java.util.stream.LongStream.of(now),
                  Arrays.stream(messages).flatMapToLong(each -> Arrays.stream(((Written) each).times)))
              .toArray();
      COMMITTED.add(batch);
    }

    @Override
    public void abort(long epochId, WriterCommitMessage[] messages) {}
  }

  private static final class Writers implements StreamingDataWriterFactory, Serializable {
    @Override
    public DataWriter<InternalRow> createWriter(int partitionId, long taskId, long epochId) {
      return new DataWriter<>() {
        private long[] times = new long[64];
        private int count;

        @Override
        public void write(InternalRow row) {
          if (count == times.length) {
            times = Arrays.copyOf(times, 2 * count);
          }
          times[count++] = row.getLong(2);
        }

        @Override
        public WriterCommitMessage commit() {
          return new Written(Arrays.copyOf(times, count));
        }

        @Override
        public void abort() {}

        @Override
        public void close() {}
      };
    }
  }
}
