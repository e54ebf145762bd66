"""What a processor sees: states, timers, codecs, and the overlay they write to."""
