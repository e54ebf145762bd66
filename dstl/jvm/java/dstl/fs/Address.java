package dstl.fs;

/**
 * The place where this host's file service listens, and what it takes to be let in.
 *
 * @param socket path of its unix socket
 * @param secret the application's
 * @param protocol version of frames and messages that the service speaks
 */
public record Address(String socket, byte[] secret, long protocol) {
  /** Return the socket alone: the secret is never shown. */
  @Override
  public String toString() {
    return socket;
  }
}
