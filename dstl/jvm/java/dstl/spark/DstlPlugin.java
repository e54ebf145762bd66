package dstl.spark;

import dstl.fs.Address;
import dstl.fs.DstlFileSystem;
import dstl.fs.DstlFs;
import dstl.fs.Service;
import java.io.IOException;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import org.apache.hadoop.conf.Configuration;
import org.apache.spark.SparkContext;
import org.apache.spark.SparkEnv;
import org.apache.spark.api.plugin.DriverPlugin;
import org.apache.spark.api.plugin.ExecutorPlugin;
import org.apache.spark.api.plugin.PluginContext;
import org.apache.spark.api.plugin.SparkPlugin;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerEvent;
import org.apache.spark.sql.streaming.StreamingQueryListener;

/** Gives an application the {@code dstl://} file system, its coordinator and its hosts' services. */
public final class DstlPlugin implements SparkPlugin {
  /** As long as a Python process may take to start on a busy host. */
  private static final long PATIENCE_MS = 60_000;

  /** A start takes about a second; each look is one message to the driver. */
  private static final long PAUSE_MS = 100;

  @Override
  public DriverPlugin driverPlugin() {
    return new Driver();
  }

  @Override
  public ExecutorPlugin executorPlugin() {
    return new Executor();
  }

  /** Starts the coordinator, and tells executors where it is. */
  private static final class Driver implements DriverPlugin {
    private Coordinator coordinator;

    @Override
    public Map<String, String> init(SparkContext context, PluginContext plugin) {
      Configuration hadoop = context.hadoopConfiguration();
      hadoop.set("fs.dstl.impl", DstlFileSystem.class.getName());
      hadoop.set("fs.AbstractFileSystem.dstl.impl", DstlFs.class.getName());
      // Each instance reads the run of its query from its own configuration.
      hadoop.setBoolean("fs.dstl.impl.disable.cache", true);
      coordinator = new Coordinator(plugin.conf());
      try {
        coordinator.locate(null);
      } catch (IOException error) {
        coordinator.close();
        throw new IllegalStateException(error.getMessage(), error);
      }
      Service.use(coordinator::locate, true);
      Service.started(coordinator.options());
      context.addSparkListener(new Ends());
      // What an executor needs goes by `receive` alone: this map would land in the application's configuration.
      return Map.of();
    }

    @Override
    public Object receive(Object message) throws IOException {
      String[] asked = (String[]) message;
      return coordinator.place(asked[0], asked[1]);
    }

    @Override
    public void shutdown() {
      if (coordinator != null) {
        Service.started(null);
        Service.use(null, false);
        coordinator.close();
      }
    }
  }

  /** Tells the coordinator which runs of queries have ended, so that it keeps nothing open of them. */
  private static final class Ends extends SparkListener {
    @Override
    public void onOtherEvent(SparkListenerEvent event) {
      if (event instanceof StreamingQueryListener.QueryTerminatedEvent ended) {
        // Nothing waits for it, least of all the bus of all listeners.
        CompletableFuture.runAsync(() -> Service.ended(ended.runId().toString()));
      }
    }
  }

  /** Finds the service of an executor's host when a task first needs it. */
  private static final class Executor implements ExecutorPlugin {
    private boolean ours;

    @Override
    public void init(PluginContext plugin, Map<String, String> configuration) {
      if (!Service.isConfigured()) {
        ours = true;
        Service.use(lost -> locate(plugin, lost), false);
      }
    }

    @Override
    public void shutdown() {
      if (ours) {
        Service.use(null, false);
      }
    }

    private static Address locate(PluginContext plugin, Address lost) throws IOException {
      // The plugin's own hostname() throws on executors of some masters.
      String host = SparkEnv.get().blockManager().blockManagerId().host();
      String gone = lost == null ? "" : lost.socket();
      for (long waited = 0; waited < PATIENCE_MS; waited += PAUSE_MS) {
        try {
          HostService place = HostService.read((byte[]) plugin.ask(new String[] {host, gone}));
          if (place.isThere()) {
            return place.address();
          }
          if (place.isToBeLaunched()) {
            place.launch(plugin.conf(), host);
          }
          Thread.sleep(PAUSE_MS);
        } catch (InterruptedException error) {
          throw PythonProcess.interrupted(
              "interrupted while the DSTL file service of " + host + " was awaited", error);
        } catch (IOException error) {
          throw error;
        } catch (Exception error) {
          throw new IOException("the driver does not say where the DSTL file service of " + host + " is", error);
        }
      }
      throw new IOException("no DSTL file service has come up on " + host + " within " + PATIENCE_MS / 1000 + " s");
    }
  }
}
