"""The states, timers and codecs of a processor, and the overlay that they write to."""
