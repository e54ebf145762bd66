import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Comparator;
import java.util.Queue;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.stream.Stream;
import org.apache.flink.api.common.JobID;
import org.apache.flink.api.common.operators.MailboxExecutor;
import org.apache.flink.changelog.fs.FsStateChangelogOptions;
import org.apache.flink.changelog.fs.FsStateChangelogStorage;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.MemorySize;
import org.apache.flink.runtime.metrics.groups.UnregisteredMetricGroups;
import org.apache.flink.runtime.state.KeyGroupRange;
import org.apache.flink.runtime.state.LocalRecoveryConfig;
import org.apache.flink.runtime.state.SnapshotResult;
import org.apache.flink.runtime.state.changelog.ChangelogStateHandle;
import org.apache.flink.runtime.state.changelog.StateChange;
import org.apache.flink.runtime.state.changelog.StateChangelogHandleReader;
import org.apache.flink.runtime.state.changelog.StateChangelogWriter;
import org.apache.flink.util.CloseableIterator;
import org.apache.flink.util.function.ThrowingRunnable;

/**
 * Flink's own changelog on the records of {@code bench append}: append and persist, then replay. One round, and one line
 * of JSON, for each line of standard input. Arguments: records, bytes of a value, key groups, and whether Flink may upload
 * ahead (its defaults) or writes everything at the persist.
 */
public final class FlinkAppend {

    /** Runs what the writer sends to its task's thread when that thread asks for it. */
    private static final class Mailbox implements MailboxExecutor {
        private final Queue<ThrowingRunnable<? extends Exception>> mails = new ConcurrentLinkedQueue<>();

        @Override
        public void execute(MailOptions options, ThrowingRunnable<? extends Exception> mail, String text, Object... args) {
            mails.add(mail);
        }

        @Override
        public void yield() {
            tryYield();
        }

        @Override
        public boolean tryYield() {
            ThrowingRunnable<? extends Exception> mail = mails.poll();
            if (mail == null) {
                return false;
            }
            try {
                mail.run();
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
            return true;
        }

        @Override
        public boolean shouldInterrupt() {
            return false;
        }
    }

    @SuppressWarnings({"unchecked", "rawtypes"})
    public static void main(String[] args) throws Exception {
        int records = Integer.parseInt(args[0]);
        int width = Integer.parseInt(args[1]);
        int groups = Integer.parseInt(args[2]);
        boolean ahead = Boolean.parseBoolean(args[3]);
        Random random = new Random(1);
        byte[][] values = new byte[1024][width];
        for (byte[] value : values) {
            byte[] half = new byte[width - width / 2];
            random.nextBytes(half);
            System.arraycopy(half, 0, value, 0, half.length);
        }
        Configuration conf = new Configuration();
        Path base = Files.createTempDirectory("flink-append");
        conf.set(FsStateChangelogOptions.BASE_PATH, base.toUri().toString());
        conf.set(FsStateChangelogOptions.COMPRESSION_ENABLED, true);
        if (!ahead) {
            conf.set(FsStateChangelogOptions.PREEMPTIVE_PERSIST_THRESHOLD, MemorySize.ofMebiBytes(4096));
            conf.set(FsStateChangelogOptions.PERSIST_DELAY, Duration.ZERO);
        }
        conf.set(FsStateChangelogOptions.IN_FLIGHT_DATA_LIMIT, MemorySize.ofMebiBytes(4096));
        BufferedReader asked = new BufferedReader(new InputStreamReader(System.in));
        while (asked.readLine() != null) {
            Mailbox mailbox = new Mailbox();
            FsStateChangelogStorage storage =
                    new FsStateChangelogStorage(
                            new JobID(),
                            conf,
                            UnregisteredMetricGroups.createUnregisteredTaskManagerJobMetricGroup(),
                            LocalRecoveryConfig.BACKUP_AND_RECOVERY_DISABLED);
            StateChangelogWriter writer = storage.createWriter("log-0", KeyGroupRange.of(0, groups - 1), mailbox);
            long began = System.nanoTime();
            for (int i = 0; i < records; i++) {
                writer.append((int) (31L * i % groups), values[i % 1024]);
            }
            CompletableFuture<SnapshotResult<?>> future = writer.persist(writer.initialSequenceNumber(), 1L);
            while (!future.isDone()) {
                mailbox.tryYield();
                Thread.onSpinWait();
            }
            ChangelogStateHandle handle = (ChangelogStateHandle) future.get().getJobManagerOwnedSnapshot();
            double append = (System.nanoTime() - began) / 1e9;
            began = System.nanoTime();
            long found = 0;
            StateChangelogHandleReader reader = (StateChangelogHandleReader) storage.createReader();
            try (CloseableIterator<StateChange> changes = reader.getChanges(handle)) {
                while (changes.hasNext()) {
                    StateChange change = changes.next();
                    found += change.getChange().length == width && change.getKeyGroup() >= 0 ? 1 : 0;
                }
            }
            double replay = (System.nanoTime() - began) / 1e9;
            if (found != records) {
                throw new IllegalStateException(found + " of " + records + " changes came back");
            }
            System.out.println(
                    "{\"append_persist_s\": " + append + ", \"replay_s\": " + replay + ", \"file_bytes\": "
                            + handle.getStateSize() + "}");
            writer.close();
            storage.close();
        }
        try (Stream<Path> files = Files.walk(base)) {
            files.sorted(Comparator.reverseOrder()).map(Path::toFile).forEach(File::delete);
        }
        System.exit(0);
    }
}
