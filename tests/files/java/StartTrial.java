package dstl.spark;

import dstl.fs.Address;
import dstl.fs.DstlFileSystem;
import dstl.fs.Service;
import java.net.URI;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.spark.SparkConf;

/**
 * Starts a coordinator with each interpreter of its arguments, and prints a line on what came of it. An argument
 * NAME=VALUE is a setting of those behind it.
 */
public final class StartTrial {
  private StartTrial() {}

  /** The first argument is a path of {@code dstl://}, which nobody should come to write. */
  public static void main(String[] arguments) throws Exception {
    SparkConf conf = new SparkConf(false).set("spark.driver.host", "127.0.0.1");
    for (int i = 1; i < arguments.length; i++) {
      String[] setting = arguments[i].split("=");
      if (setting.length > 1) {
        conf.set(setting[0], setting[1]);
        continue;
      }
      conf.set("spark.dstl.python", arguments[i]);
      try (Coordinator coordinator = new Coordinator(conf)) {
        Address found = coordinator.locate(null);
        System.out.println("started");
        Service.use(lost -> new Address(found.socket(), new byte[found.secret().length], found.protocol()), false);
        DstlFileSystem files = new DstlFileSystem();
        files.initialize(URI.create("dstl:///"), new Configuration(false));
        files.create(new Path(arguments[0]), false).close();
        System.out.println("written with another secret");
      } catch (Exception error) {
        System.out.println(error.getClass().getSimpleName() + ": " + error.getMessage());
      }
    }
    System.exit(0);
  }
}
