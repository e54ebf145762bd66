package dstl.fs;

import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.util.EnumSet;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.CreateFlag;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.Options;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.util.Progressable;

/** {@link DstlFileSystem} for {@code FileContext}, whose rename says whether it may overwrite. */
public final class DstlFs extends DelegateToFileSystem {
  private final DstlFileSystem files;

  /** Open the file system of a URI; Hadoop finds this constructor by its arguments. */
  public DstlFs(URI uri, Configuration configuration) throws IOException, URISyntaxException {
    this(uri, configuration, new DstlFileSystem());
  }

  private DstlFs(URI uri, Configuration configuration, DstlFileSystem files) throws IOException, URISyntaxException {
    super(uri, files, configuration, DstlFileSystem.SCHEME, false);
    this.files = files;
  }

  /** Create a file; its directories need not be there. */
  @Override
  public FSDataOutputStream createInternal(
      Path path,
      EnumSet<CreateFlag> flag,
      FsPermission permission,
      int bufferSize,
      short replication,
      long blockSize,
      Progressable progress,
      Options.ChecksumOpt checksum,
      boolean createParent)
      throws IOException {
    return files.create(
        path, permission, flag.contains(CreateFlag.OVERWRITE), bufferSize, replication, blockSize, progress);
  }

  @Override
  public void renameInternal(Path source, Path target) throws IOException {
    renameInternal(source, target, false);
  }

  @Override
  public void renameInternal(Path source, Path target, boolean overwrite) throws IOException {
    files.move(source, target, overwrite);
  }
}
