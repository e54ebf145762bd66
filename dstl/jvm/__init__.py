"""The part of DSTL that runs in Spark's JVMs: its sources, its jar, and how the one becomes the other."""
