package dstl.fs;

import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.nio.BufferUnderflowException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Packs and unpacks the part of msgpack that headers of frames use: nil, booleans, integers, strings, bytes, lists and
 * maps with string keys. Equal values have the bytes that Python's msgpack gives them: the handshake proves them.
 */
public final class Msgpack {
  /** Headers are three deep at most; a stack overflow is no answer to a header that is made up. */
  private static final int MAX_DEPTH = 16;

  private Msgpack() {}

  /** Return the bytes of a value. */
  public static byte[] pack(Object value) throws IOException {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    write(new DataOutputStream(bytes), value);
    return bytes.toByteArray();
  }

  /** Return the value that the bytes hold, all of them. */
  public static Object unpack(ByteBuffer bytes) throws IOException {
    try {
      Object value = read(bytes, 0);
      if (bytes.hasRemaining()) {
        throw new IOException(bytes.remaining() + " bytes follow a frame's header");
      }
      return value;
    } catch (BufferUnderflowException error) {
      throw new IOException("a frame's header is cut off", error);
    }
  }

  private static void write(DataOutputStream out, Object value) throws IOException {
    if (value == null) {
      out.writeByte(0xc0);
    } else if (value instanceof Boolean flag) {
      out.writeByte(flag ? 0xc3 : 0xc2);
    } else if (value instanceof Number number) {
      writeInteger(out, number.longValue());
    } else if (value instanceof String text) {
      byte[] encoded = text.getBytes(StandardCharsets.UTF_8);
      if (encoded.length < 32) {
        out.writeByte(0xa0 | encoded.length);
      } else {
        writeLength(out, encoded.length, 0xd9);
      }
      out.write(encoded);
    } else if (value instanceof byte[] raw) {
      writeLength(out, raw.length, 0xc4);
      out.write(raw);
    } else if (value instanceof Collection<?> items) {
      writeSize(out, items.size(), 0x90, 0xdc);
      for (Object item : items) {
        write(out, item);
      }
    } else if (value instanceof Map<?, ?> map) {
      writeSize(out, map.size(), 0x80, 0xde);
      for (Map.Entry<?, ?> entry : map.entrySet()) {
        write(out, entry.getKey());
        write(out, entry.getValue());
      }
    } else {
      throw new IOException("no message holds a " + value.getClass());
    }
  }

  private static void writeInteger(DataOutputStream out, long value) throws IOException {
    if (value >= -32 && value < 128) {
      out.writeByte((int) value);
    } else if (value >= 0 && value < 1 << 8) {
      out.writeByte(0xcc);
      out.writeByte((int) value);
    } else if (value >= 0 && value < 1 << 16) {
      out.writeByte(0xcd);
      out.writeShort((int) value);
    } else if (value >= 0 && value < 1L << 32) {
      out.writeByte(0xce);
      out.writeInt((int) value);
    } else {
      out.writeByte(value >= 0 ? 0xcf : 0xd3);
      out.writeLong(value);
    }
  }

  private static void writeLength(DataOutputStream out, int length, int marker) throws IOException {
    if (length < 1 << 8) {
      out.writeByte(marker);
      out.writeByte(length);
    } else if (length < 1 << 16) {
      out.writeByte(marker + 1);
      out.writeShort(length);
    } else {
      out.writeByte(marker + 2);
      out.writeInt(length);
    }
  }

  private static void writeSize(DataOutputStream out, int size, int small, int large) throws IOException {
    if (size < 16) {
      out.writeByte(small | size);
    } else {
      out.writeByte(large);
      out.writeShort(size);
    }
  }

  private static Object read(ByteBuffer in, int depth) throws IOException {
    if (depth > MAX_DEPTH) {
      throw new IOException("a frame's header is nested too deeply");
    }
    int marker = in.get() & 0xff;
    if (marker < 0x80 || marker >= 0xe0) {
      return (long) (byte) marker;
    }
    if (marker < 0x90) {
      return readMap(in, marker & 0x0f, depth);
    }
    if (marker < 0xa0) {
      return readList(in, marker & 0x0f, depth);
    }
    if (marker < 0xc0) {
      return readText(in, marker & 0x1f);
    }
    return switch (marker) {
      case 0xc0 -> null;
      case 0xc2 -> false;
      case 0xc3 -> true;
      case 0xc4 -> readBytes(in, in.get() & 0xff);
      case 0xc5 -> readBytes(in, in.getShort() & 0xffff);
      case 0xc6 -> readBytes(in, in.getInt());
      case 0xcb -> in.getDouble();
      case 0xcc -> (long) (in.get() & 0xff);
      case 0xcd -> (long) (in.getShort() & 0xffff);
      case 0xce -> in.getInt() & 0xffffffffL;
      case 0xcf, 0xd3 -> in.getLong();
      case 0xd0 -> (long) in.get();
      case 0xd1 -> (long) in.getShort();
      case 0xd2 -> (long) in.getInt();
      case 0xd9 -> readText(in, in.get() & 0xff);
      case 0xda -> readText(in, in.getShort() & 0xffff);
      case 0xdb -> readText(in, in.getInt());
      case 0xdc -> readList(in, in.getShort() & 0xffff, depth);
      case 0xdd -> readList(in, in.getInt(), depth);
      case 0xde -> readMap(in, in.getShort() & 0xffff, depth);
      case 0xdf -> readMap(in, in.getInt(), depth);
      default -> throw new IOException("a frame's header holds the msgpack type " + Integer.toHexString(marker));
    };
  }

  private static byte[] readBytes(ByteBuffer in, int length) throws IOException {
    if (length < 0 || length > in.remaining()) {
      throw new IOException("a frame's header declares " + length + " bytes of " + in.remaining());
    }
    byte[] raw = new byte[length];
    in.get(raw);
    return raw;
  }

  private static String readText(ByteBuffer in, int length) throws IOException {
    return new String(readBytes(in, length), StandardCharsets.UTF_8);
  }

  private static List<Object> readList(ByteBuffer in, int size, int depth) throws IOException {
    if (size < 0 || size > in.remaining()) {
      throw new IOException("a frame's header declares a list of " + size);
    }
    // No more room ahead than few take: each of nested lists may declare all that is left.
    List<Object> items = new ArrayList<>(Math.min(size, 16));
    for (int i = 0; i < size; i++) {
      items.add(read(in, depth + 1));
    }
    return items;
  }

  private static Map<String, Object> readMap(ByteBuffer in, int size, int depth) throws IOException {
    if (size < 0 || size > in.remaining()) {
      throw new IOException("a frame's header declares a map of " + size);
    }
    Map<String, Object> map = new LinkedHashMap<>();
    for (int i = 0; i < size; i++) {
      map.put(String.valueOf(read(in, depth + 1)), read(in, depth + 1));
    }
    return map;
  }
}
